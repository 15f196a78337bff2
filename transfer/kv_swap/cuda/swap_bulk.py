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
"""From bench/sweep_swap.py and sweep_pages.py (H200, PCIe Gen5 x16, driver 580, 21 Nov 2026; all
rows are in bench/results/h200/sweep.json): GB/s by page, and the slowdown of an 8192-cubed product.

    ring (CTAs x stages x KiB / drains)   4 KiB  64 KiB  2 MiB   product
    2 x 4 x 14 / 2                                52.6   52.5     1.07
    2 x 5 x 10 / 2                         51.7   52.6   45.0     1.07
    4 x 4 x  8 / 2                         52.4   52.6   52.4     1.18
    1 x 3 x 64 / 1                         35.3   41.2   41.1
    vector kernel, 4 CTAs                  51.0   51.0   51.1     1.91

No ring moved more than 52.6. An idle warp that only sleeps slows the product by 1.059."""

LOAD_RING = Ring(ctas=2, stages=8, tile_bytes=16 << 10, drains=2)
"""The same sweep, GB/s alone and with decode-like products, and the slowdown of a reduction:

    ring                                  64 KiB   decode  reduction
    2 x  8 x 16 / 2                         51.0     49.0      1.091
    2 x  8 x 16 / 1                         51.1     45.8      1.099
    2 x 10 x 16 / 3                         51.0     50.0      1.102
    1 x 12 x 16 / 1                         49.7

Reads take longer while stores fill their half of the link: 5 stages then move 30 GB/s, 8 move 38,
13 move 42. 8 is the most that does not slow a reduction more than the copy engine does."""

FAMILY = bulk_family(STORE_RING, LOAD_RING)
