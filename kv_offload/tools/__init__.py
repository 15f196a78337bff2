"""The `kv-offload` command line. Small subcommands are modules here, larger ones are folders.

The tools run without an engine: from `kv_offload.engines` they import only names and versions.
"""
