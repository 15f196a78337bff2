"""The command line, `kv-offload`: config here, and doctor, size and status in folders.

The tools run where no engine runs: of `kv_offload.engines` they import names and versions only.
"""
