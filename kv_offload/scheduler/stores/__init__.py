"""Stores: copies to host memory.

- `planner`: from what a step has to pinned blocks; the rest of the scheduler talks to it.
- `candidates`: how far each request has been gone through.
- `choice`: which of these blocks are worth storing.
- `budget`: how many may be stored now.
- `refusals`: which blocks did not fit packed slots, and whether there are too many.
- `backlog`: what ended requests left behind, to be stored later.
"""
