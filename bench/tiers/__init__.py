"""How fast slots move between host memory and a disk.

bench_tiers.py   rates beside plain direct I/O, and what a job takes of its caller's time
"""
