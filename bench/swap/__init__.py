"""Measures block copies between GPU and host memory, and the cost of page-locking that memory.

bench_swap.py   rates, latencies and the slowdown of compute: pytest-benchmark
bed.py          its test bed: a CUDA engine, the roofline and vLLM's own copy
workloads.py    compute that runs next to copies
pinning.py      how long an engine waits while host memory is locked
real_kv.py      how many blocks of a language model's KV do not fit packed slots; needs no GPU
"""
