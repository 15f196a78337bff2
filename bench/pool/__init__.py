"""Benchmarks of engines that share host memory (`host_pool`).

__main__.py       `python -m bench.pool`: conversations that change replica, with real engines
workload.py       the conversations, by shape
section.py        the requests to one of these engines
bench_lookups.py  the CPU time of key lookups in peers
"""
