"""The `kv-offload` command line. Small subcommands are modules here, larger ones are folders.

The tools run without an engine: they import only names and versions from `kv_offload.engines`.
"""
