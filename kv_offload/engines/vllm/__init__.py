"""The vLLM integration: the only folder that imports vLLM.

vLLM calls `plugin` in every process and builds the class in `connector`. `start` runs once, `hooks`
in every step. `model` describes a model's KV cache; `patches` wraps methods of vLLM.
"""

CONNECTOR = "KVOffloadConnector"
"""The connector's name in vLLM's `--kv-transfer-config`."""
