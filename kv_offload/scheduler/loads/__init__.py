"""What is copied from host memory.

- `admissions`: what a waiting request gets; the rest of the scheduler talks to it.
- `lookups`: which prefix of it host memory has.
- `decision`: how a hit is served, as a function of what that costs.
- `costs`: what loads and prompts cost now.
"""
