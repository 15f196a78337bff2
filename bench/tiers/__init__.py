"""Benchmarks of the tiers below host memory.

bench_tiers.py   rates of remote stores, and how long lookups take
__main__.py      `python -m bench.tiers`: first tokens and decodes of real engines
section.py       the requests to one of these engines
replicas.py      `python -m bench.tiers.replicas`: the gain of replicas that share a store
"""
