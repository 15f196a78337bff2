"""Families of swap kernels: their launch parameters, and which family suits a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_swap.cuda.device import device_index, shared_memory_bytes
from kv_swap.engine import Direction
from kv_swap.errors import DeviceError
from kv_swap.layout import KVLayout
from kv_swap.packing.format import (
    FORMAT_VERSION,
    MAGIC,
    MAX_COLUMNS,
    PACKED_TILE_BYTES,
    TILE_BYTES,
    TILE_GROUPS,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Launch parameters of one direction, and the size of the tiles that slots are cut into.

    A tile has at most `tile_bytes` bytes and `segments_per_tile` segments. `shared_bytes` is
    dynamic shared memory.
    """

    ctas: int
    threads: int
    tile_bytes: int
    segments_per_tile: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """A source file in csrc with the functions `swap_store` and `swap_load`, and their launches.

    It runs on devices of at least `min_capability` with `shared_bytes` of shared memory per CTA,
    static and dynamic. `options` are passed to the compiler. A family that `packs` moves the packed
    tiles of a layout, any other family the raw parts.
    """

    name: str
    source: str
    min_capability: tuple[int, int]
    shapes: Mapping[Direction, LaunchShape]
    options: tuple[str, ...] = ()
    packs: bool = False
    shared_bytes: int = 48 << 10


_WARP = 32
_DRAINS = 2
_STORE_STAGES, _LOAD_STAGES = 4, 8
_TILE_BYTES = {Direction.STORE: 14 << 10, Direction.LOAD: 16 << 10}
"""Two CTAs of one warp each drive a ring of stages, and drain at most `_DRAINS` stages at once.

Stores move 52.6 GB/s with pages of 64 KiB or more, and no other ring moved more. They slow an
8192-cubed matrix product by a factor of 1.07; four CTAs by 1.18, the vector kernel by 1.91.

Loads move 51.0 GB/s alone, and 49.0 next to products like those of decodes; with one drain 45.8.
Next to stores, 5 stages move 30 GB/s, 8 move 38 and 13 move 42. 8 slow a reduction by 1.091; more
than 8 slow it more than the copy engine does. (H200, PCIe Gen5 x16, driver 580, 21 Nov 2026.)"""

_BULK_STATIC_BYTES = 12416
"""Shared memory of eight stages that NVRTC reports for `swap_bulk.cu` on sm_90 to sm_120."""


def _bulk(name: str, load_stages: int) -> KernelFamily:
    stages = {Direction.STORE: _STORE_STAGES, Direction.LOAD: load_stages}
    shapes = {
        way: LaunchShape(2, _WARP, _TILE_BYTES[way], _WARP, stages[way] * _TILE_BYTES[way])
        for way in Direction
    }
    options = (
        *(f"-DKV_SWAP_{way.name}_STAGES={stages[way]}" for way in Direction),
        *(f"-DKV_SWAP_{way.name}_TILE_BYTES={_TILE_BYTES[way]}" for way in Direction),
        f"-DKV_SWAP_DRAINS={_DRAINS}",
    )
    shared_bytes = max(shape.shared_bytes for shape in shapes.values()) + _BULK_STATIC_BYTES
    return KernelFamily(name, "swap_bulk.cu", (9, 0), shapes, options, shared_bytes=shared_bytes)


BULK = _bulk("bulk", _LOAD_STAGES)
"""Bulk copies through shared memory."""

BULK_SMALL = _bulk("bulk_small", 5)
"""The same with fewer load stages: GPUs of compute capability 12 have 99 KiB per CTA."""

_VECTOR = LaunchShape(ctas=4, threads=1024, tile_bytes=4096, segments_per_tile=1)
"""4 CTAs of 1,024 threads filled a PCIe Gen5 x16 link with pages of 4 KiB or more (H200, 21 Nov
2026). 16 moved no more and slowed a bf16 product 2.9 times. A warp copies one tile at a time."""

VECTOR = KernelFamily(
    "vector",
    "swap_vector.cu",
    (7, 5),
    {Direction.STORE: _VECTOR, Direction.LOAD: _VECTOR},
)
"""16-byte loads and stores."""

_GROUPS = 2
_PACKED_WARPS = {Direction.STORE: 10, Direction.LOAD: 8}
_PACKED_STAGES = {Direction.STORE: 3, Direction.LOAD: 5}
_PACKED_BUFFERS = 3
"""Two CTAs, each with two groups of 8 warps that pack or unpack. A group that packs has two more
warps, to fill and to drain.

Stores move 66 GB/s of KV and loads 65, where `BULK` moves 52 and 51; both use the link as fully as
`BULK` does. With only 8 warps per group, stores moved 43. An 8192-cubed product is slowed by 1.093
and 1.074 (`BULK`: 1.076 and 1.074), products like those of decodes by 1.018 and 1.047 (1.009 and
1.037). Next to the latter, stores with two stages move 44 GB/s instead of 55, and loads with three
stages 53 instead of 61; alone they are as fast. (H200, PCIe Gen5 x16, driver 580, 26 Nov 2026.)"""


def _packed_shape(direction: Direction) -> LaunchShape:
    store = direction is Direction.STORE
    stage_bytes = (TILE_BYTES if store else PACKED_TILE_BYTES) + TILE_GROUPS
    group_bytes = _PACKED_STAGES[direction] * stage_bytes
    group_bytes += _PACKED_BUFFERS * PACKED_TILE_BYTES if store else 0
    threads = _GROUPS * _PACKED_WARPS[direction] * _WARP
    return LaunchShape(2, threads, TILE_BYTES, 1, _GROUPS * group_bytes)


_PACKED_STATIC_BYTES = 40448
"""Shared memory that NVRTC reports for `swap_packed.cu` on sm_90 to sm_120."""

PACKED = KernelFamily(
    "packed",
    "swap_packed.cu",
    (9, 0),
    {way: _packed_shape(way) for way in Direction},
    (
        *(f"-DKV_SWAP_{way.name}_STAGES={_PACKED_STAGES[way]}" for way in Direction),
        f"-DKV_SWAP_STORE_BUFFERS={_PACKED_BUFFERS}",
        f"-DKV_SWAP_PACKED_TILE_BYTES={PACKED_TILE_BYTES}",
        f"-DKV_SWAP_MAX_COLUMNS={MAX_COLUMNS}",
        f"-DKV_SWAP_PACKED_MAGIC={MAGIC}",
        f"-DKV_SWAP_PACKED_VERSION={FORMAT_VERSION}",
    ),
    packs=True,
    shared_bytes=max(_packed_shape(way).shared_bytes for way in Direction) + _PACKED_STATIC_BYTES,
)
"""Bulk copies through shared memory, where data is packed. `BULK` copies raw parts."""

FAMILIES = (BULK, BULK_SMALL, VECTOR)
"""Families that copy raw bytes, fastest first."""


def can_run(family: KernelFamily, device: torch.device) -> bool:
    """Return whether `device` can run a family. Raises `DeviceError`."""
    import torch

    capability = torch.cuda.get_device_capability(device_index(device))
    return (
        capability >= family.min_capability and shared_memory_bytes(device) >= family.shared_bytes
    )


def choose_family(device: torch.device) -> KernelFamily | None:
    """Return the fastest family that `device` can run; `None` if there is none."""
    return next((family for family in FAMILIES if can_run(family, device)), None)


def can_pack(capability: tuple[int, int]) -> bool:
    """Return whether GPUs of a compute capability can pack; 12.x has too little shared memory."""
    return capability >= PACKED.min_capability and capability[0] != 12


def families_of(layout: KVLayout, raw: KernelFamily | None) -> list[KernelFamily]:
    """Return the families that together copy a layout's blocks; `raw` copies the raw parts.

    Raises `DeviceError` if `raw` is None, or if the layout is packed and `raw` is not `BULK`.
    """
    if raw is None:
        major, minor = VECTOR.min_capability
        raise DeviceError(
            f"this GPU runs no copy kernel: they need compute capability {major}.{minor} or newer, "
            f"and {VECTOR.shared_bytes} bytes of shared memory for a block of threads"
        )
    if not layout.num_tiles:
        return [raw]
    if raw is not BULK:
        major, minor = PACKED.min_capability
        raise DeviceError(
            f"the layout is packed, which needs the kernels of compute capability {major}.{minor} "
            f"and newer with {PACKED.shared_bytes} bytes of shared memory for a block of threads, "
            f"but this GPU has less: do not pack KV here"
        )
    all_packed = all(region.raw_part is None for region in layout.regions)
    return [PACKED] if all_packed else [PACKED, raw]
