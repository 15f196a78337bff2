"""Announcements about host memory and tiers to routers, independent of the engine.

- `records`: a block's facts, kept so that it can be announced after its request has ended.
- `announcer`: turns changes of the cache manager into announcements, some in each step.

Neither exists where the engine's KV events are off.
"""
