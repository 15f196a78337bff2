"""A tier shared by many engines: objects in a store, found by name.

client.py    the interface of a store, and the keys of objects
mooncake.py  Mooncake Store; s3.py: S3; folder.py: a shared folder
sweep.py     keeps a folder or a bucket within its limit
tier.py      the tier: copies slots of the arena to objects and back
probe.py     measures a store
"""
