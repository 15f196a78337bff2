"""The host cache: which slot holds which block, and which prefix of a request it can serve.

- `manager`: stores, loads, evictions and resets, and the log of readable and lost keys for KV
  events; the rest of the package talks to it.
- `lasting`: a manager whose slots outlive the process, with `directory`, the file that lists them.
- `key_index`: the part of a directory that finds keys.
- `peers`: reads the directories of other engines and leases their slots; `peer_slots`: from lookup
  to load.
- `index`: maps keys to slots.
- `policies`: pick the slot to reuse next.
- `prefix`: turns the tokens of a request into keys and finds the longest prefix that can be loaded.
- `retention`: slots that requests asked to keep for some time.
- `slot_refcounts`: the loads and stores running on each slot.
- `disk_index`: maps keys to the slots of a disk, in a file that survives a restart.
- `slots`: shared types and errors.

Pure Python and NumPy: nothing here imports an engine or a device.
"""
