"""The command line, `kv-offload`: one module a subcommand."""
