"""Copies blocks between a KV cache and host memory, asynchronously.

Describe the cache (`TensorDescription`, `KVLayout`), create an engine (`create_engine`), submit
jobs (`SwapJob`) and poll for completions, as in `transfer/example.py`. The package does not depend
on an inference engine. Its subpackages are `memory` (host memory for slots), `cuda` and `host` (one
engine each), `packing` (the format of packed slots), and `tiers` (storage below host memory).
"""

from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import (
    CopyError,
    DeviceError,
    JobError,
    LayoutError,
    PinnedMemoryError,
    TierError,
    TransferError,
)
from kv_swap.factory import EngineKind, create_engine, numa_node
from kv_swap.layout import KVLayout, Packing, Region, TensorDescription
from kv_swap.memory.registration import MemoryRoom
from kv_swap.memory.shared import SharedMemory

__all__ = [
    "Completion",
    "CopyError",
    "DeviceError",
    "Direction",
    "EngineKind",
    "JobError",
    "KVLayout",
    "LayoutError",
    "MemoryRoom",
    "Packing",
    "PinnedMemoryError",
    "Region",
    "SharedMemory",
    "SwapEngine",
    "SwapJob",
    "TensorDescription",
    "TierError",
    "TransferError",
    "create_engine",
    "numa_node",
]
