"""Maps keys to the slots of a disk, in a SQLite file that a restart finds.

The file is only an index: each record on the disk names its block and is verified when it is read.
So the file may lag behind, and a wrong entry costs one read of the disk.

- `index`: the interface for the scheduler, and the thread that writes.
- `changes`: changes that are not in the file yet.
- `file`: opening, locking, creating and refusing the file.
- `contents`: the format of the file, and reading it.
"""

from kv_offload.cache.disk_index.index import DiskIndex

__all__ = ["DiskIndex"]
