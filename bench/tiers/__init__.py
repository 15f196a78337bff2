"""Benchmarks of the tiers below host memory.

bench_tiers.py   rates of remote stores, and how long they take to look blocks up
__main__.py      `python -m bench.tiers`: first tokens and decodes of real engines
section.py       the requests to one of these engines
replicas.py      `python -m bench.tiers.replicas`: what replicas gain from a store that they share
"""
