"""How csrc/swap_bulk.cu is launched: bulk copies through shared memory, for sm_90 and newer."""

from __future__ import annotations

from dataclasses import dataclass

from kv_swap.cuda.swap import KernelFamily, LaunchShape
from kv_swap.engine import Direction

MIN_CAPABILITY = (9, 0)

_WARP = 32


@dataclass(frozen=True, slots=True)
class Ring:
    """The stages of each of `ctas` CTAs; `drains` of them may be on their way out at once."""

    ctas: int
    stages: int
    tile_bytes: int
    drains: int

    @property
    def shape(self) -> LaunchShape:
        """The launch this makes."""
        return LaunchShape(self.ctas, _WARP, self.tile_bytes, _WARP, self.stages * self.tile_bytes)


def bulk_family(store: Ring, load: Ring) -> KernelFamily:
    """Return the family with these rings."""
    return KernelFamily(
        "bulk",
        "swap_bulk.cu",
        {Direction.STORE: store.shape, Direction.LOAD: load.shape},
        tuple(
            f"-DKV_SWAP_{name}_{what}={value}"
            for name, ring in (("STORE", store), ("LOAD", load))
            for what, value in (
                ("STAGES", ring.stages),
                ("DRAINS", ring.drains),
                ("TILE_BYTES", ring.tile_bytes),
            )
        ),
    )


STORE_RING = Ring(ctas=2, stages=4, tile_bytes=14 << 10, drains=2)
"""No ring moved more than its 52.6 GB/s from 64 KiB pages on. It slows an 8192-cubed product by
1.07; four CTAs slow it by 1.18, and the vector kernel by 1.91. An idle warp that only sleeps slows
it by 1.059. (bench/sweep_swap.py and sweep_pages.py, H200, PCIe Gen5 x16, driver 580, 21 Nov 2026;
all rows are in bench/results/h200/sweep.json.)"""

LOAD_RING = Ring(ctas=2, stages=8, tile_bytes=16 << 10, drains=2)
"""From the same sweep: 51.0 GB/s alone, and 49.0 while decode-like products run, where one drain
moves 45.8. Reads take longer while stores fill their half of the link: 5 stages then move 30 GB/s,
8 move 38, 13 move 42. 8 is the most that does not slow a reduction more than the copy engine does:
by 1.091."""

FAMILY = bulk_family(STORE_RING, LOAD_RING)
