"""How csrc/swap_vector.cu is launched: 16-byte loads and stores, for devices before sm_90."""

from __future__ import annotations

from kv_swap.cuda.swap import KernelFamily, LaunchShape
from kv_swap.engine import Direction

MIN_CAPABILITY = (7, 5)

_SHAPE = LaunchShape(ctas=4, threads=1024, tile_bytes=4096, segments_per_tile=1)
"""4 CTAs of 1,024 threads filled a PCIe Gen5 x16 link from 4 KiB pages on (H200, 21 Nov 2026); 16
moved no more and slowed a bf16 product 2.9 times. A warp copies a tile at a time: 8 vectors a lane,
so that 16 MiB give each warp 32 tiles."""

FAMILY = KernelFamily("vector", "swap_vector.cu", {Direction.STORE: _SHAPE, Direction.LOAD: _SHAPE})
