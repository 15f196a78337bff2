"""The packed format: a tile of 16 KiB takes 12.4 KiB in a slot, whatever its contents.

A tile is 8,192 bf16 values in 1,024 groups of 8. Packed, it is

    0      8192  sign and mantissa of each value, one byte each
    8192   4096  4-bit codes of the exponents, 4 bytes a group: value j and value j + 4 in byte j
    12288    16  header: see `HEADER`
    12304     c  a base for each of c columns, c a multiple of 8; see `Packing`
    12304+c      escapes, 8 bytes each, by strips; zeros after the last

Each pair of values is a 32-bit word. After rotation to the left by one bit, its odd bytes are
exponents, and its even bytes are mantissas, each with the sign of the other value.

The base of a column is its largest exponent minus 15, and at least 1. The code of an exponent is
its distance from the base of its column, so the 16 exponents from the base up have a code. If one
of 32 groups, 32 * n to 32 * n + 31, has an exponent 0 (zeros and subnormal numbers), code 0 means
that exponent in all of them, and the base has no code. So single channels can be zero.

A group escapes if an exponent has no code, or if its codes equal `ESCAPE_CODES`, which mark all
groups that escape. The 8 exponents of such a group are stored in the escapes. A tile has 8 strips,
which are packed concurrently: strip s has the groups g with g % 256 // 32 == s. Escapes are in the
order of the strips, and within a strip in the order of the groups.

A tile with more escapes than fit is raw: its first 12 KiB are in its place, and its header names
the entry in the slot's pool that holds the other 4 KiB. Entries are assigned in the order of the
tiles; unused entries are zero. A block with more raw tiles than entries does not fit, and its slot
holds garbage.

The values determine every byte: equal KV has equal slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import LayoutError

FORMAT_VERSION = 2
"""Changes with every change of the format. Slots of other versions cannot be read."""

MAGIC = 0x564B
"""`KV` in memory."""

GROUP_VALUES = 8
TILE_GROUPS = 1024
TILE_BYTES = 2 * GROUP_VALUES * TILE_GROUPS
MANTISSA_BYTES = GROUP_VALUES * TILE_GROUPS
CODE_BYTES = MANTISSA_BYTES // 2
MAIN_BYTES = MANTISSA_BYTES + CODE_BYTES
PACKED_TILE_BYTES = 12672
"""A multiple of 128: tiles of 12,480 bytes moved 5 % slower (H200, 24 Nov 2026).

That leaves room for 38 escapes with the most columns, and 45 with the fewest. A tile of SmolLM2's
KV has at most 32, one of Gemma 3's 10. With 3 % of K's channels 128 times as large, a tile has at
most 60 and 54, and at most 1 and 5 tiles of a block have too many
(bench/results/cpu/packing.json)."""

POOL_ENTRY_BYTES = TILE_BYTES - MAIN_BYTES
TILES_PER_POOL_ENTRY = 64

SLOT_ALIGNMENT_BYTES = 128
"""Alignment of packed pages, of the pool, and of slots with packed pages."""

STRIPS = 8

GREATEST_CODE = 15
ESCAPE_CODES = (0, 1, 1, 1, 1, 1, 1, 1)
"""Very few groups naturally have these codes, because most values are much larger."""

MAX_COLUMNS = 64
"""More columns leave less room for escapes; fewer columns cause more escapes. For K with outliers
as above, in rows of 1,024 channels and tiles of 12,544 bytes, 0.4 % of tiles had more escapes than
fit with 64 columns, 1.2 % with 128 and 4 % with 32."""

HEADER = np.dtype(
    [
        ("magic", "<u2"),
        ("version", "u1"),
        ("kind", "u1"),
        ("zeros_or_entry", "<u4"),
        ("escapes", "u1"),
        ("escapes_before", "u1", (STRIPS - 1,)),
    ]
)
"""In a packed tile, bit n of `zeros_or_entry` is set if groups 32 * n to 32 * n + 31 have an
exponent 0; in a raw tile, the field is the pool entry. `escapes_before` counts the escapes before
each strip except the first. In a raw tile, this field, `escapes` and all bytes after the header are
zero."""

KIND_PACKED = 1
KIND_RAW = 2

ESCAPE_BYTES = GROUP_VALUES


def escape_capacity(columns: int) -> int:
    """Return how many groups can escape in a tile with bases for `columns` columns."""
    return (PACKED_TILE_BYTES - MAIN_BYTES - HEADER.itemsize - columns) // ESCAPE_BYTES


def align(nbytes: int) -> int:
    """Round up to `SLOT_ALIGNMENT_BYTES`."""
    return -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def packed_page_bytes(page_bytes: int) -> int:
    """Return the bytes of a packed page: its whole tiles packed, its remainder raw."""
    num_tiles, rest_bytes = divmod(page_bytes, TILE_BYTES)
    return num_tiles * PACKED_TILE_BYTES + rest_bytes


def pool_entries(num_tiles: int) -> int:
    """Return the number of pool entries in a slot of `num_tiles` packed tiles."""
    return -(-num_tiles // TILES_PER_POOL_ENTRY)


def packed_slot_bytes(packed_pages: Iterable[int], raw_bytes: int) -> int:
    """Return the bytes of a slot with packed pages of these sizes, `raw_bytes`, and its pool."""
    pages = list(packed_pages)
    num_tiles = sum(page_bytes // TILE_BYTES for page_bytes in pages)
    if num_tiles == 0:
        return sum(pages) + raw_bytes
    tiles_bytes = sum(align(packed_page_bytes(page_bytes)) for page_bytes in pages)
    return align(tiles_bytes + raw_bytes) + pool_entries(num_tiles) * POOL_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows are arranged in a packed page of bf16 values, counted in groups of 8 values.

    Group g belongs to column `g // run * period + g % period`. In a page of tokens, each with all
    heads, the period is one token, and the run is 0: the whole page. In a page of heads, each with
    all tokens, the period is one head of one token, and the run is one head. Raises `LayoutError`.
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

    `count` is a multiple of 8. `order` sorts the groups by column; the `used` columns begin at
    `firsts` in it.
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
    """Return the columns given as one byte per group; equal columns share one object."""
    of_group = np.frombuffer(columns, np.uint8)
    used, firsts = np.unique(np.sort(of_group), return_index=True)
    count = (int(used[-1]) // 8 + 1) * 8
    return TileColumns(of_group, count, np.argsort(of_group, kind="stable"), firsts, used)
