"""How fast blocks move between GPU and host memory.

bench_swap.py   rates, latencies and the slowdown of compute: pytest-benchmark
bed.py          what it measures on: a CUDA engine, the roofline and vLLM's own copy
workloads.py    compute that runs beside copies
"""
