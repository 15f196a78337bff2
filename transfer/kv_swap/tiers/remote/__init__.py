"""A tier shared by many engines: objects in a store, found by name.

client.py    what a store must offer
mooncake.py  Mooncake Store: its calls, and what its codes mean
mooncake_session.py  a connection to it; Mooncake is imported by the first
keys.py      names of objects
tier.py      the engine: slots of the arena to objects and back
mover.py     what one of its threads does with some rows of a job
"""
