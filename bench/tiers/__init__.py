"""What tiers below host memory bring.

bench_tiers.py   rates of a disk beside plain direct I/O, and what a job takes of its caller's time
bench_store.py   rates of a store, and what asking it takes
__main__.py      `python -m bench.tiers`: first tokens and decodes of real engines
section.py       what one of these engines is asked for
replicas.py      `python -m bench.tiers.replicas`: what replicas gain from a store that they share
"""
