"""Tiers below host memory: copy slots of the arena to them and back, asynchronously.

engine.py     the interface of a tier: jobs, completions, guarantees
disk.py       the tier in a file on a disk: moves its records to the arena and back
file.py       opens that file: its lock, its space, direct I/O
region.py     the file's description of itself, and its format
record.py     a slot in that file, and its format
remote/       the tier in a store that many engines share
workers.py    the threads: jobs in, completions out; the movers that run on them
probe.py      measures a disk without an engine

This package does not know which block is in which slot. A slot is found by its number, an object in
a store by its name; both are verified by name.
"""
