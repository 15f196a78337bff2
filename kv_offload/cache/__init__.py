"""Which block is in which slot of the host cache, and which prefix of a request it can serve.

- `manager`: stores, loads, evictions and resets; the rest of the package talks to it.
- `index`: which key is in which slot, on a `key_map`.
- `policies`: which slot is reused next.
- `prefix`: from the tokens of a request to keys, and the longest prefix that can be loaded.
- `changes`: what became readable and what was forgotten, for KV events.
- `running`: which slots are being read or written.
- `disk_index`: which key is in which slot of a disk, in a file that a restart finds.
- `slots`: the types and errors that they share.

Pure Python and NumPy: nothing here imports an engine or a device.
"""
