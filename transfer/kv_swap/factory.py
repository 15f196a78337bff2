"""Creates the engine and the arena for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kv_swap.cuda.device import CudaRegistrar
from kv_swap.engine import SwapEngine
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.memory.numa import device_node
from kv_swap.memory.registration import MemoryRoom
from kv_swap.memory.shared import SharedMemory

if TYPE_CHECKING:
    import torch

EngineKind = Literal["host", "cuda"]
"""The kind of engine: for KV caches on the host, or on a CUDA device."""


def numa_node(kind: EngineKind, device: torch.device) -> int | None:
    """Return the NUMA node closest to `device`; None on the host, or on machines with one node."""
    return None if kind == "host" else device_node(CudaRegistrar(device).pci_bus_id)


def create_engine(
    kind: EngineKind | Literal["auto"],
    layout: KVLayout,
    num_slots: int,
    *,
    keep_alive: Sequence[torch.Tensor],
    device: torch.device | None = None,
    output_copy_stream: torch.cuda.Stream | None = None,
    shared: SharedMemory | None = None,
    room: MemoryRoom | None = None,
    num_windows: int = 0,
) -> SwapEngine:
    """Allocate an arena of `num_slots` slots and return the engine that copies to and from it.

    `keep_alive` are the KV tensors of `layout`, on `device`. `auto` means `cuda` for a CUDA device,
    else `host`. `cuda` page-locks the arena, mostly in the background (`SwapEngine.ready_slots`)
    and only while `room` has memory; its stores also wait for `output_copy_stream`. A `shared`
    arena is the same memory in every process that passes a handle to it; the handle can be closed
    afterwards. Arenas of up to `num_windows` other processes can be read (`SwapEngine.windows`).
    """
    device = device or keep_alive[0].device
    if kind == "auto":
        kind = "cuda" if device.type == "cuda" else "host"
    arena = HostArena(
        num_slots,
        layout.slot_bytes,
        register=None if kind == "host" else CudaRegistrar(device),
        background=True,
        # Processes that share an arena have already spread it over the nodes of all devices.
        numa_node=None if shared is not None else numa_node(kind, device),
        shared=shared,
        room=room,
        num_windows=num_windows,
    )
    if kind == "host":
        return HostSwapEngine(layout, arena, keep_alive)
    from kv_swap.cuda.engine import CudaSwapEngine

    return CudaSwapEngine(layout, arena, device, keep_alive, output_copy_stream)
