"""Benchmarks and the demo, which run as modules from the checkout.

    serving/     a real engine with and without offloading: `python -m bench.serving`
    swap/        copies between GPU and host memory
    scheduler/   host time of the plugin's hooks in a step; needs no GPU
    trace/       hit ratios of a trace by policy and capacity: `python -m bench.trace TRACE`
    demo.py      `make demo`; environment.py makes the environments of the Makefile
    results/     one current run per subject: h200/swap.json, cpu/scheduler.json, ...

`docs/benchmarks` explains the figures. Files named `bench_*.py` are for pytest-benchmark.
Benchmarks may import `tests.support`, but nothing else from the tests.
"""
