"""vLLM: the only folder that imports it.

`plugin` is what vLLM calls in every process, `connector` the class that it builds. `start` runs
once, `hooks` in every step. `model` knows a model's KV cache, `patches` the methods we wrap.
"""

CONNECTOR = "KVOffloadConnector"
"""Our name in vLLM's `--kv-transfer-config`."""
