"""Benchmarks of the tiers below host memory.

bench_tiers.py   rates of a disk and of remote stores, and what they take of their caller's time
__main__.py      `python -m bench.tiers`: first tokens and decodes of real engines
section.py       the requests to one of these engines
replicas.py      `python -m bench.tiers.replicas`: what replicas gain from a store that they share
"""
