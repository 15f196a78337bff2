"""Allocates a rank's share of host memory, and creates the transfer engine on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kv_swap.cuda.kernel_families import PACKED, can_pack
from kv_swap.engine import SwapEngine
from kv_swap.errors import DeviceError, PinnedMemoryError
from kv_swap.factory import EngineKind, create_engine, numa_node
from kv_swap.memory.arena_file import ArenaFiles
from kv_swap.memory.registration import MemoryRoom
from kv_swap.memory.shared import SharedMemory

from kv_offload.config import OffloadConfig, describe_bytes
from kv_offload.config.host_memory import headroom_bytes, read_available_memory, read_host_memory
from kv_offload.engine import KVCaches
from kv_offload.errors import CapacityError, ConfigError, UnsupportedError
from kv_offload.worker.sharing import ALONE, SharingRanks, arena_bytes, open_shared_memory
from kv_offload.worker.windows import count_windows

if TYPE_CHECKING:
    import torch

FindFiles = Callable[[SharingRanks, int], ArenaFiles]
"""Returns the files for arenas of this many slots, shared by these ranks."""

USEFUL_SLOTS = 1000
"""Slots that the error for a too small pool suggests; fewer hold about one long prompt."""


def transfer_kind(config: OffloadConfig, device: str) -> EngineKind:
    """Return the kind of transfer engine for a KV cache on a device type (`cpu` or `cuda`).

    Raises `UnsupportedError` for other types, `ConfigError` if the configuration asks for another
    kind.
    """
    kinds: dict[str, EngineKind] = {"cpu": "host", "cuda": "cuda"}
    kind = kinds.get(device)
    if kind is None:
        raise UnsupportedError(f"the KV cache is on {device}: supported are CUDA devices and CPU")
    if config.transfer_engine not in ("auto", kind):
        raise ConfigError(
            f"transfer_engine is {config.transfer_engine!r}, but the KV cache of this engine is on "
            f"{device}: use 'auto' or {kind!r}"
        )
    return kind


def check_packing(capability: tuple[int, int] | None) -> None:
    """Raise `UnsupportedError` if a GPU of this compute capability (None: unknown) cannot pack."""
    if capability is not None and not can_pack(capability):
        (major, minor), needed = capability, PACKED.min_capability
        raise UnsupportedError(
            f"pack_kv is true, but this GPU has compute capability {major}.{minor}, and kernels "
            f"that pack need {needed[0]}.{needed[1]} or newer, but not 12, which has too little "
            f"shared memory: set pack_kv to false"
        )


def allocate(
    config: OffloadConfig,
    num_ranks: int,
    sharing: SharingRanks,
    kind: EngineKind,
    caches: KVCaches,
    layers: Sequence[str],
    output_copy_stream: torch.cuda.Stream | None,
    find_files: FindFiles | None = None,
) -> tuple[SwapEngine, SharingRanks, str]:
    """Return a transfer engine with this rank's arena, the ranks that share it, and its name.

    The ranks in `sharing` have the same KV bytes and share one arena; if one of them cannot, each
    has its own, and `ALONE` is returned. With `find_files`, the arena is a file, reused if an
    earlier process left one with the same slots; otherwise the arena has no name. `layers` are in
    the order in which the engine registered them, and must be at the same offsets of a slot on all
    these ranks. Blocks until the slowest peer is done. The transfer engine holds the KV tensors.
    Raises `CapacityError`, and `UnsupportedError` if the device cannot run the copy kernels.
    """
    layout, device = caches.layout, caches.tensors[0].device
    num_slots = _count_slots(config, num_ranks, sharing, layout.slot_bytes)
    shared: SharedMemory | None = None
    try:
        if sharing.count > 1 or find_files is not None:
            places = [(r.slot_offset_bytes, r.page_bytes, r.packing) for r in layout.regions]
            node = numa_node(kind, device)

            def open_memory() -> SharedMemory | None:
                source = SharedMemory if find_files is None else find_files(sharing, num_slots)
                nbytes = num_slots * layout.slot_bytes
                return open_shared_memory(sharing, nbytes, (tuple(layers), places), node, source)

            shared = open_memory()
            if shared is None:
                sharing = ALONE
                num_slots = _count_slots(config, num_ranks, sharing, layout.slot_bytes)
                if find_files is not None:
                    shared = open_memory()
        with shared or contextlib.nullcontext():
            transfer = create_engine(
                kind,
                layout,
                num_slots,
                device=device,
                keep_alive=caches.tensors,
                output_copy_stream=output_copy_stream,
                shared=shared,
                num_windows=0 if find_files is None else count_windows(num_slots),
                room=MemoryRoom(read_available_memory, headroom_bytes(read_host_memory())),
            )
    except PinnedMemoryError as error:
        raise CapacityError(str(error)) from error
    except DeviceError as error:
        raise UnsupportedError(str(error)) from error
    return transfer, sharing, "" if shared is None else shared.name


def _count_slots(
    config: OffloadConfig, num_ranks: int, sharing: SharingRanks, slot_bytes: int
) -> int:
    """Return the number of slots in the arena of these ranks. Raises `CapacityError` if it is 0."""
    share_bytes = arena_bytes(config.cpu_bytes, num_ranks, sharing.count)
    if share_bytes < slot_bytes:
        num_arenas = num_ranks // sharing.count
        holder = f"each of {num_arenas} ranks" if num_arenas > 1 else "this engine"
        useful_bytes = USEFUL_SLOTS * slot_bytes * num_arenas
        raise CapacityError(
            f"cpu_bytes gives {holder} {describe_bytes(share_bytes)}, and one slot takes "
            f"{describe_bytes(slot_bytes)}: a pool needs thousands of them, set cpu_bytes to "
            f"{-(-useful_bytes // (1 << 30))}GiB or more"
        )
    return share_bytes // slot_bytes
