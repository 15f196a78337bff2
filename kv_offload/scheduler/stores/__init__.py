"""Stores: copies to host memory.

- `planner`: from the requests of a step to pinned blocks; the rest of the scheduler calls it.
- `candidates`: the blocks that a step examines, and how far each request was examined.
- `choice`: which of these blocks are stored.
- `budget`: how many may be stored now.
- `refusals`: which blocks did not fit packed slots, and whether there are too many.
- `backlog`: blocks of ended requests that are stored later.
"""
