"""The user's configuration, and the size of host memory.

Any package may import this one. Only `host_memory` reads sizes of memory; only `sizes` parses
units.
"""

from kv_offload.config.schema import SCHEMA, SECTIONS, DiskConfig, OffloadConfig, RemoteConfig
from kv_offload.config.sizes import describe_bytes
from kv_offload.config.trace import DEFAULT, EXTRA_CONFIG, FILE_KEY, ResolvedConfig, trace_config

__all__ = [
    "DEFAULT",
    "EXTRA_CONFIG",
    "FILE_KEY",
    "SCHEMA",
    "SECTIONS",
    "DiskConfig",
    "OffloadConfig",
    "RemoteConfig",
    "ResolvedConfig",
    "describe_bytes",
    "trace_config",
]
