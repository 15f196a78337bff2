"""Tiers below host memory: copy slots of the arena to them and back, asynchronously.

engine.py     a tier: jobs, completions, what may be relied upon
disk.py       the engine for a file on a disk
file.py       opens that file: its lock, its space, direct I/O
region.py     what that file says of itself, and its format
record.py     a slot in that file, and its format
transfers.py  records between the file and the arena, on one thread
remote/       the engine for a store that many engines share
workers.py    the threads: jobs in, completions out; what moves rows on them
probe.py      what a disk gives without an engine

This package does not know which block is in which slot. A slot is found by its number, an object of
a store by its name, and both are verified by name.
"""
