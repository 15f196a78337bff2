"""Maps keys to the slots of a disk, in a SQLite file that a restart finds.

The file is only an index: each record on the disk names its block and is verified when it is read.
So the file may lag behind, and a wrong entry costs one read of the disk.
"""

from kv_offload.cache.disk_index.index import DiskIndex

__all__ = ["DiskIndex"]
