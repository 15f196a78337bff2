"""The checks of `kv-offload doctor`. Each function checks one subject and returns report lines.

Nothing here imports vLLM, and only measuring copies imports torch. A subject that cannot be
inspected gets a line with the reason.
"""

BLOCK_BYTES = 2 << 20
"""Size of a measured copy: a block of 16 tokens of an 8B model."""
TOKEN_BYTES = BLOCK_BYTES // 16
