"""What the user asks for, and how much host memory there is for it.

Every room may import this one; it imports `kv_offload.errors` only. `host_memory` is the only place
that reads the size of memory, and `sizes` the only one that reads or writes units.
"""

from kv_offload.config.schema import SCHEMA, OffloadConfig
from kv_offload.config.sizes import describe_bytes
from kv_offload.config.trace import DEFAULT, EXTRA_CONFIG, FILE_KEY, TracedConfig, trace_config

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
