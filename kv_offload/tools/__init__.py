"""The command line, `kv-offload`: config and simulate here, the others in folders.

The tools run where no engine runs: of `kv_offload.engines` they import names and versions only.
"""
