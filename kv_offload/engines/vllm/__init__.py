"""vLLM: the only folder that imports it.

- `plugin`: the entry point that vLLM calls in every process. `connector`: the class that it builds.
- `start`: what runs once, at the start. `model`: what a model's KV cache is.
- `hooks`: what vLLM calls in every step. `patches`: which methods of vLLM are wrapped.
- `versions`, `call_stack`: what differs between versions, and what vLLM does not hand over.
"""

CONNECTOR = "KVOffloadConnector"
"""Our name in vLLM's `--kv-transfer-config`."""
