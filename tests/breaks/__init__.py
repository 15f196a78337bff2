"""Breaks: each takes one protection out of the product, and the tests must notice.

A protection keeps wrong tokens, leaks, hangs or crashes away: a pin, a wait, a check, the order of
two calls. `python -m tests.breaks` takes them out one by one, in a copy of the tree. The breaks
stand in one TOML file for each package:

    [["kv_offload/scheduler/stores/jobs.py"]]
    protects = "What holds thanks to it, and does not without it, in one sentence."
    old = '''text that occurs exactly once in the file'''
    new = '''what stands there instead'''   # nothing if left out
    tests = "pytest's arguments: the fewest tests that notice, in seconds"
    hangs = true   # only where a test that does not end is what tells; false if left out

- `breaks`: reads these files, and says whether a break still fits the product.
- `copies`: a copy of the tree that a break is applied to, and the tests that run there.
- `warm`: a process that has imported vLLM once, and starts each run of tests without that wait.
"""
