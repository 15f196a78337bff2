"""What is kept below host memory, on a disk or in a store that engines share.

- `scheduler`: the scheduler's half with a tier; nothing else of the scheduler knows of one.
- `tier`: what is asked of a tier, and whether it is used at the moment.
- `slot_tier`: one whose slots are this engine's, a disk.
- `shared_tier`: one that others read and write too, a store.
- `demotions`: what is written to it, and when.
- `promotions`: which requests wait for what is read from it.
"""
