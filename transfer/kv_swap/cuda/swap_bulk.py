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
"""Swept by bench/sweep_swap.py on an H200 (PCIe Gen5 x16, driver 580), 21 Nov 2026, GB/s of 256 MiB
on the device and slowdown of an 8192-cubed product, a reduction and decode-like products:

    ring (CTAs x stages x KiB / drains)   4 KiB  64 KiB  2 MiB   product  reduction  decode
    2 x 5 x 10 / 2                         51.7   52.6   45.0     1.07      1.005     1.005
    2 x 4 x 14 / 2                                52.6   52.5     1.07
    2 x 4 x 16 / 2                         52.3   52.5   52.5     1.08      1.033     1.007
    2 x 5 x  8 / 2                         46.9   52.4   49.0     1.065     1.003     1.003
    4 x 4 x  8 / 2                         52.4   52.6   52.4     1.18      1.046     1.051
    8 x 4 x  4 / 2                         52.4   52.5   52.3     1.26      1.040     1.055
    16 x 4 x 2 / 2                         51.9   52.2   52.0     1.43      1.087     1.149
    1 x 3 x 64 / 1                         35.3   41.2   41.1
    vector kernel, 4 CTAs                  51.0   51.0   51.1     1.91      1.53      3.1
    copy engine, contiguous                       55.3            1.00      1.010     1.007

The pages of 2 MiB lie scattered; bench/sweep_pages.py has more of them. No ring that was tried
moves more than 52.6. An idle warp that only sleeps slows the product by
1.059 already, so what is left to gain there is 0.02."""

LOAD_RING = Ring(ctas=2, stages=8, tile_bytes=16 << 10, drains=2)
"""The same sweep:

    ring                                   4 KiB  64 KiB  2 MiB   product  reduction  decode
    2 x  8 x 16 / 1                        51.1   51.3   51.3     1.07      1.074     1.025
    2 x  5 x 16 / 1                        51.1   51.4   51.4     1.066     1.062     1.023
    2 x 13 x 16 / 1                                               1.08      1.100     1.029
    4 x  4 x  8 / 1                        50.7   51.3   51.3     1.10      1.060     1.065
    16 x 5 x  2 / 1                        51.1   51.1   51.2     1.16      1.100     1.13
    1 x 12 x 16 / 1                        37.6   49.7   49.1     1.06      1.044     1.015
    copy engine, contiguous                       55.4            1.006     1.078     1.029

Beside work that is bound by device memory the table of tiles has to be fetched far ahead
(`SegmentCursor` in csrc/swap_bulk.cu, docs/design/transfer.md, 'Beside compute'). Since it is, a second
tile on its way out helps there (sweep 6, GB/s alone and beside each kind of work, with its
slowdown):

    ring                          64 KiB     product    reduction       decode
    2 x  8 x 16 / 1                 51.1  50.4 1.069   50.0 1.099   45.8 1.028
    2 x  8 x 16 / 2                 51.0  50.3 1.067   49.8 1.091   49.0 1.031
    2 x  8 x 16 / 3                 51.0  50.2 1.068   49.0 1.089   45.5 1.032
    2 x 10 x 16 / 3                 51.0  50.5 1.068   50.4 1.102   50.0 1.033
    2 x  6 x 32 / 1                 51.0  50.6 1.073   50.6 1.106   50.2 1.032
    copy engine, contiguous         54.4  55.2 1.001   55.2 1.074   54.8 1.021

Beside stores that fill their half of the link reads take longer: 5 stages then move 30 GB/s, 8 move
38, 13 move 42, where the kernels' limit of 84 GB/s for both is reached. 8 is the most that does not
slow a reduction more than the copy engine does."""

FAMILY = bulk_family(STORE_RING, LOAD_RING)
