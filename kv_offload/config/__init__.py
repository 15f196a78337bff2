"""What the user asks for, and how much host memory there is for it. Imports no other room."""

from kv_offload.config.trace import (
    DEFAULT,
    EXTRA_CONFIG,
    FILE_KEY,
    SCHEMA,
    OffloadConfig,
    TracedConfig,
    describe_bytes,
    trace_config,
)

__all__ = [
    "DEFAULT",
    "EXTRA_CONFIG",
    "FILE_KEY",
    "SCHEMA",
    "OffloadConfig",
    "TracedConfig",
    "describe_bytes",
    "trace_config",
]
