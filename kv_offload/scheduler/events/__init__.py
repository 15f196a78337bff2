"""Announcements of host memory to routers, in no engine's words.

- `records`: a block's facts, kept so that it can be announced after its request has ended.
- `announcer`: from the changes of the cache manager to announcements, some in each step.

Neither exists where the engine's KV events are off.
"""
