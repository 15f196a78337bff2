"""vLLM: the only folder that imports it."""

CONNECTOR = "KVOffloadConnector"
"""Our name in vLLM's `--kv-transfer-config`."""
