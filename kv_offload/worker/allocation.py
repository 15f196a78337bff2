"""Takes a rank's share of host memory, and builds the transfer engine over it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_swap.engine import SwapEngine
from kv_swap.factory import EngineKind, create_engine, numa_node
from kv_swap.layout import KVLayout
from kv_swap.memory.shared import SharedMemory

from kv_offload.config import OffloadConfig
from kv_offload.engine import KVCaches
from kv_offload.errors import CapacityError, ConfigError, UnsupportedError
from kv_offload.worker.capacity import growing_room
from kv_offload.worker.sharing import ALONE, Peers, arena_bytes, open_shared_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Allocation:
    """A rank's host memory: the transfer engine that owns it, its slots, and who shares it."""

    transfer: SwapEngine
    num_slots: int
    peers: Peers
    seconds: float

    def describe(self) -> str:
        """Return what it is like, for the log."""
        layout = self.transfer.layout
        sharing = f", kept once for {self.peers.count} ranks" if self.peers.count > 1 else ""
        return (
            f"{self.num_slots} slots, {self.transfer.ready_slots} of them ready, of "
            f"{layout.slot_bytes} bytes ({self.num_slots * layout.slot_bytes / (1 << 30):.2f} "
            f"GiB{sharing}) over {len(layout.regions)} regions, started in {self.seconds:.1f} s"
        )


def transfer_kind(config: OffloadConfig, device: torch.device) -> EngineKind:
    """Return the kind of transfer engine for a KV cache on `device`.

    Raises `UnsupportedError` for other devices, `ConfigError` if the configuration wants another.
    """
    kinds: dict[str, tuple[EngineKind, ...]] = {"cpu": ("host",), "cuda": ("cuda", "dma")}
    if device.type not in kinds:
        raise UnsupportedError(f"the KV cache is on {device}: supported are CUDA devices and CPU")
    fitting = kinds[device.type]
    for kind in fitting:
        if config.transfer_engine in ("auto", kind):
            return kind
    raise ConfigError(
        f"transfer_engine is {config.transfer_engine!r}, but the KV cache of this engine is on "
        f"{device}: use 'auto' or {' or '.join(map(repr, fitting))}"
    )


def allocate(
    config: OffloadConfig,
    num_ranks: int,
    peers: Peers,
    kind: EngineKind,
    caches: KVCaches,
    layers: Sequence[str],
    output_copy_stream: torch.cuda.Stream | None,
) -> Allocation:
    """Allocate a rank's arena, and build the transfer engine, which holds it and the KV tensors.

    `peers` have the same KV bytes. They share one arena, or each has its own if one of them cannot
    share: then the allocation's peers are `ALONE`. Peers must have the same `layers`, in the order
    in which the engine registered them. Waits for the slowest peer. Raises `CapacityError`.
    """
    started = time.monotonic()
    layout, device = caches.layout, caches.tensors[0].device
    shared = None
    if peers.count > 1:
        shared = _open_shared_memory(config, num_ranks, peers, kind, layout, layers, device)
    if shared is None:
        peers = ALONE
    num_slots = _count_slots(config, num_ranks, peers, layout.slot_bytes)
    with shared or contextlib.nullcontext():
        transfer = create_engine(
            kind,
            layout,
            num_slots,
            device=device,
            keep_alive=caches.tensors,
            output_copy_stream=output_copy_stream,
            shared=shared,
            room=growing_room(),
        )
    return Allocation(transfer, num_slots, peers, time.monotonic() - started)


def _open_shared_memory(
    config: OffloadConfig,
    num_ranks: int,
    peers: Peers,
    kind: EngineKind,
    layout: KVLayout,
    layers: Sequence[str],
    device: torch.device,
) -> SharedMemory | None:
    """Return memory for the slots of all peers; None if one of them cannot share it.

    Peers must have the same layers' bytes at the same places of a slot.
    """
    slot_bytes = layout.slot_bytes
    places = [(region.slot_offset_bytes, region.page_bytes) for region in layout.regions]
    return open_shared_memory(
        peers,
        _count_slots(config, num_ranks, peers, slot_bytes) * slot_bytes,
        (tuple(layers), places),
        numa_node(kind, device),
    )


def _count_slots(config: OffloadConfig, num_ranks: int, peers: Peers, slot_bytes: int) -> int:
    """Return how many slots fit the arena of these peers. Raises `CapacityError` if none does."""
    share_bytes = arena_bytes(config.cpu_bytes, num_ranks, peers.count)
    if share_bytes < slot_bytes:
        num_arenas = num_ranks // peers.count
        raise CapacityError(
            f"cpu_bytes gives each of {num_arenas} ranks {share_bytes} bytes, and one slot takes "
            f"{slot_bytes}: set cpu_bytes to {slot_bytes * num_arenas} or more"
        )
    return share_bytes // slot_bytes
