"""What routers are told of host memory, in no engine's words.

- `records`: what is remembered of a block, so that it can be announced after its request has ended.
- `announcer`: from the changes of the cache manager to announcements, some in each step.

Neither exists where the engine's KV events are off.
"""
