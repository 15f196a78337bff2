"""How csrc/swap_bulk.cu is launched: bulk copies through shared memory, for sm_90 and newer.

Each of two CTAs, a warp each, has a ring of stages; `_DRAINS` of them may be on their way out at
once. No other ring moved more than the stores' 52.6 GB/s from 64 KiB pages on. They slow an
8192-cubed product by 1.07; four CTAs slow it by 1.18, and the vector kernel by 1.91.

Loads move 51.0 GB/s alone, and 49.0 while decode-like products run, where one drain moves 45.8.
Reads take longer while stores fill their half of the link: 5 stages then move 30 GB/s, 8 move 38,
13 move 42. 8 is the most that does not slow a reduction more than the copy engine does: by 1.091.
(H200, PCIe Gen5 x16, driver 580, 21 Nov 2026, in a sweep of stages that was not kept.)
"""

from __future__ import annotations

from kv_swap.cuda.swap import KernelFamily, LaunchShape
from kv_swap.engine import Direction

MIN_CAPABILITY = (9, 0)

_CTAS = 2
_WARP = 32
_DRAINS = 2
_STAGES = {Direction.STORE: 4, Direction.LOAD: 8}
_TILE_BYTES = {Direction.STORE: 14 << 10, Direction.LOAD: 16 << 10}

FAMILY = KernelFamily(
    "bulk",
    "swap_bulk.cu",
    {
        way: LaunchShape(_CTAS, _WARP, _TILE_BYTES[way], _WARP, _STAGES[way] * _TILE_BYTES[way])
        for way in Direction
    },
    tuple(
        f"-DKV_SWAP_{way.name}_{what}={value}"
        for way in Direction
        for what, value in (
            ("STAGES", _STAGES[way]),
            ("DRAINS", _DRAINS),
            ("TILE_BYTES", _TILE_BYTES[way]),
        )
    ),
)
