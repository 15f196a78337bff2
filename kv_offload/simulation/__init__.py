"""Estimates the hits of a cache: on recorded traces, or at other sizes while an engine serves.

- `trace`: reads a trace from JSON lines, which `trace_recorder` writes while an engine serves.
- `replay`: runs a trace through the real cache manager and a policy, or unlimited memory.
- `miss_ratio_curve`: estimates hits at other sizes on a sample of the blocks, with `mini_sim`.
"""
