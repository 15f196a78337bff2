"""Which values of a tile share a base: those of one column, 8 channels over the tokens of the tile.

A channel whose values are far greater than those of the others has a base of its own then, and does
not make the others escape. Where a page's rows lie is all that a caller has to say; a wrong answer
costs escapes, never bits. But it is part of the format: who unpacks needs the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import LayoutError
from kv_swap.packing.format import MAX_COLUMNS, TILE_GROUPS


@dataclass(frozen=True, slots=True)
class Packing:
    """A page of bf16 values is packed, and its rows lie like this; counts are groups of 8 values.

    Group g has the column `g // run * period + g % period`. A page of tokens that hold all heads
    has the period of a token, and run 0: the whole page. A page of heads that hold all tokens has
    the period of one head of one token, and the run of a head. Raises `LayoutError`.
    """

    period: int
    run: int = 0

    def __post_init__(self) -> None:
        if self.period < 1 or self.run < 0:
            raise LayoutError(
                f"a packing has period {self.period} and run {self.run}; the period must be at "
                f"least 1, and the run 0 (the whole page) or more"
            )


@dataclass(frozen=True, slots=True, eq=False)
class TileColumns:
    """The columns of a tile: uint8 of `(1024,)`, one a group, below `count`, a multiple of 8.

    `order` sorts the groups by column; at `firsts` of it begin the columns that are `used`.
    """

    of_group: NDArray[np.uint8]
    count: int
    order: NDArray[np.intp]
    firsts: NDArray[np.intp]
    used: NDArray[np.uint8]


def tile_columns(packing: Packing, first_group: int) -> TileColumns:
    """Return the columns of the tile that begins at a group of its page.

    Neighbours are merged until there are at most `MAX_COLUMNS`. Tiles whose columns are the same
    have the same object.
    """
    groups = first_group + np.arange(TILE_GROUPS)
    columns = groups % packing.period
    if packing.run:
        columns += groups // packing.run * packing.period
    columns -= columns.min()
    while columns.max() >= MAX_COLUMNS:
        columns //= 2
    return describe_columns(columns.astype(np.uint8).tobytes())


@lru_cache(maxsize=1024)
def describe_columns(columns: bytes) -> TileColumns:
    """Return the columns of a tile from a byte a group; equal ones are the same object."""
    of_group = np.frombuffer(columns, np.uint8)
    used, firsts = np.unique(np.sort(of_group), return_index=True)
    count = (int(used[-1]) // 8 + 1) * 8
    return TileColumns(of_group, count, np.argsort(of_group, kind="stable"), firsts, used)
