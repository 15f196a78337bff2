"""A tier shared by many engines: objects in a store, found by name.

client.py    what a store must offer, and the names of objects
mooncake.py  Mooncake Store; s3.py: S3; folder.py: a shared folder
sweep.py     keeps a folder or a bucket within its limit
tier.py      the engine: slots of the arena to objects and back
probe.py     measures a store
"""
