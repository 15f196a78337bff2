"""Which key is in which slot of a disk, kept in a SQLite file so that a restart finds it.

The file is a directory and no more: each record on the disk says what it is, and is verified when
it is read. So the file may lag behind, and what is wrong in it costs a look at the disk.

- `index`: what a scheduler talks to, and the thread that writes.
- `changes`: what the file has not got yet.
- `file`: one engine has it; how it is opened, made and refused.
- `contents`: its format, and reading it.
"""

from kv_offload.cache.disk_index.index import DiskIndex

__all__ = ["DiskIndex"]
