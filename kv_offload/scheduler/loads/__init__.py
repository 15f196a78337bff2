"""What is copied from host memory.

- `admissions`: what a waiting request gets; the rest of the scheduler talks to it.
- `lookups`: which prefix of it host memory has.
- `choice`: whether that is loaded or computed.
- `mode`: whether its step waits for the load.
"""
