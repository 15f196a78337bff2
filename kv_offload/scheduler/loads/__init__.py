"""Loads: copies from host memory to GPU blocks.

- `admissions`: from the lookup of a waiting request to its load; the scheduler calls it.
- `lookups`: finds the prefix that host memory has.
- `decision`: decides how a hit is served, a pure function of costs.
- `costs`: the current costs of loads and prompts.
"""
