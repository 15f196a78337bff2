"""The host cache: which slot holds which block, and which prefix of a request it can serve.

`manager` is the entry point. Pure Python and NumPy: nothing here imports an engine or a device.
"""
