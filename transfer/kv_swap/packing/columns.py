"""Columns of a tile: values that share a base, from 8 channels over the tokens of the tile.

So a channel whose values are much greater than those of others has its own base, and does not make
the others escape. The caller only describes the rows of a page; a wrong description costs escapes,
never correctness. But it is part of the format: unpacking needs the same description.
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
    """The arrangement of rows in a packed page of bf16 values, counted in groups of 8 values.

    Group g belongs to column `g // run * period + g % period`. For a page of tokens, each with all
    heads, the period is one token, and run is 0: the whole page. For a page of heads, each with all
    tokens, the period is one head of one token, and the run is one head. Raises `LayoutError`.
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
    """The column of each group of a tile: uint8 of shape `(1024,)`, below `count`.

    `count` is a multiple of 8. `order` sorts the groups by column; in it, the `used` columns begin
    at `firsts`.
    """

    of_group: NDArray[np.uint8]
    count: int
    order: NDArray[np.intp]
    firsts: NDArray[np.intp]
    used: NDArray[np.uint8]


def tile_columns(packing: Packing, first_group: int) -> TileColumns:
    """Return the columns of the tile that begins at group `first_group` of its page.

    Neighbouring columns are merged until there are at most `MAX_COLUMNS`. Tiles with equal columns
    share one object.
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
    """Return the columns of a tile, given as one byte per group; equal ones share one object."""
    of_group = np.frombuffer(columns, np.uint8)
    used, firsts = np.unique(np.sort(of_group), return_index=True)
    count = (int(used[-1]) // 8 + 1) * 8
    return TileColumns(of_group, count, np.argsort(of_group, kind="stable"), firsts, used)
