"""What is copied to host memory.

- `planner`: from what a step has to a job; the rest of the scheduler talks to it.
- `candidates`: which blocks a step looks at.
- `choice`: which of these are worth storing.
- `budget`: how many may be stored now.
- `jobs`: stores on their way, and the GPU blocks that they pin.
- `leftovers`: what ended requests left behind, to be stored later.
"""
