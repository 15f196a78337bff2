"""The checks of `kv-offload doctor`: a function a subject, which returns lines of the report.

Nothing here imports vLLM, and torch and NVML only where they are needed and present. What cannot be
looked at is a line that says so.
"""

BLOCK_BYTES = 2 << 20
"""Size of a measured copy: as large as a block of 16 tokens of an 8B model."""
TOKEN_BYTES = BLOCK_BYTES // 16
