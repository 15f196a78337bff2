"""Which key is in which slot of host memory; no engine, no device, pure Python and NumPy."""
