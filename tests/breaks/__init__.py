"""Breaks: each takes one protection out of the product, and the tests must notice.

A protection keeps wrong tokens, leaks, hangs or crashes away: a pin, a wait, a check, the order of
two calls. `python -m tests.breaks` takes them out one by one, in a copy of the tree. The lists are
text, one for each package, one line for each break:

    = kv_offload/cache/manager.py
    @ tests/kv_offload/cache/test_cache_manager.py::test_name
    prepare_load: drop self._table.start_loads(slots)  # A slot is not evicted while it is read.

- `=` names the file that is changed, until the next `=`.
- `@` gives pytest's arguments for the lines after it: the fewest tests that notice, in seconds.
  `@hangs` stands where a test that does not end is what tells.
- Before the colon stands a function or class, by as much of the end of its qualified name as no
  other in the file has, or `*` for the whole file; then the change, in an operator of `mutations`;
  after `#` what holds thanks to the protection, and does not without it.

Modules:

- `mutations`: the operators, which find their place by tokens, so that no line break matters.
- `breaks`: reads the lists, and says whether a break still fits the product.
- `copies`: a copy of the tree that a break is applied to, and the tests that run there.
- `warm`: a process that has imported vLLM once, and starts each run of tests without that wait.
"""
