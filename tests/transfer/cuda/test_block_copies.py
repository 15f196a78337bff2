"""Blocks cut into copies: every byte once, at its place, and within one registration."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.block_copies import (
    LEAST_RUN_BYTES,
    MOST_COPY_BYTES,
    BlockCutter,
    Copies,
    runs_of,
    suits_copy_engine,
)
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Packing, Region

KIB, MIB = 1 << 10, 1 << 20
ARENA, CACHE = 1 << 40, 1 << 50
NEVER = 1 << 40
"""A registration that no slot crosses."""


def layers(count: int, page_bytes: int, step: int, first: int = CACHE) -> KVLayout:
    """Layers of an allocation, `step` bytes apart."""
    return KVLayout(
        64,
        tuple(
            Region(first + i * step, page_bytes, page_bytes, i * page_bytes) for i in range(count)
        ),
    )


def arena_of(layout: KVLayout, piece_bytes: int = NEVER) -> Any:
    return SimpleNamespace(address=ARENA, slot_bytes=layout.slot_bytes, piece_bytes=piece_bytes)


def parts_of(copies: Copies, direction: Direction) -> list[tuple[int, int, int]]:
    """Host, device and bytes of every copy."""
    arrays = (copies.destinations, copies.sources, copies.nbytes)
    listed = [*zip(*(array.tolist() for array in arrays), strict=True)]
    if direction is Direction.STORE:
        return listed
    return [(of, to, nbytes) for to, of, nbytes in listed]


def joined(parts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Host, device and bytes of runs, in order, where neighbours on both sides are one."""
    found: list[tuple[int, int, int]] = []
    for host, device, nbytes in sorted(parts):
        first, place, size = found[-1] if found else (host, device, 0)
        assert first + size <= host, "copied twice"
        if (first + size, place + size) == (host, device):
            found[-1:] = [(first, place, size + nbytes)]
        else:
            found.append((host, device, nbytes))
    return found


TWO = KVLayout(9, (Region(CACHE, 64, 64, 0), Region(CACHE + 8192, 48, 80, 64)))
ROWS = layers(5, 64 * KIB, 9 * 64 * KIB)
OUTERMOST = KVLayout(
    64, tuple(Region(CACHE + i * 4096, 4096, 4 * 4096, i * 4096) for i in range(4))
)
"""Layers of a block side by side: one run."""
MIXED = KVLayout(
    64,
    (
        *layers(4, 96 * KIB, 64 * 96 * KIB).regions,
        Region(CACHE + (1 << 40), 5 * MIB, 6 * MIB, 384 * KIB),
    ),
)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("layout", "piece_bytes"),
    [
        *((TWO, piece_bytes) for piece_bytes in (16, 48, 80, 4096, NEVER)),
        *((ROWS, piece_bytes) for piece_bytes in (4096, 48 * KIB, 320 * KIB, 400 * KIB, NEVER)),
        *((OUTERMOST, piece_bytes) for piece_bytes in (4096, 6144, NEVER)),
        *((MIXED, piece_bytes) for piece_bytes in (MIB, 7 * MIB, NEVER)),
    ],
)
def test_copies_bring_every_byte_and_end_where_a_registration_does(layout, piece_bytes, direction):
    pairs = np.array([(8, 0), (2, 5), (3, 1)], np.int32)
    cutter = BlockCutter(layout.regions, arena_of(layout, piece_bytes))
    copies = cutter.cut(pairs, direction)
    parts = parts_of(copies, direction)
    assert joined(parts) == joined(
        (
            ARENA + slot * layout.slot_bytes + region.slot_offset_bytes,
            region.address + block * region.block_stride_bytes,
            region.page_bytes,
        )
        for block, slot in pairs.tolist()
        for region in layout.regions
    )
    places = copies.sources if direction is Direction.LOAD else copies.destinations
    for host, nbytes in zip(places.tolist(), copies.nbytes.tolist(), strict=True):
        assert (host - ARENA) // piece_bytes == (host - ARENA + nbytes - 1) // piece_bytes
        assert nbytes <= MOST_COPY_BYTES


@pytest.mark.parametrize(
    ("layout", "runs"),
    [
        (layers(3, 64, 640), [Region(CACHE + i * 640, 64, 64, 64 * i) for i in range(3)]),
        (TWO, [Region(CACHE, 64, 64, 0), Region(CACHE + 8192, 48, 80, 64)]),
        (OUTERMOST, [Region(CACHE, 4 * 4096, 4 * 4096, 0)]),
        # The layers stand side by side in another order than in the slot.
        (
            KVLayout(9, (Region(CACHE + 64, 64, 128, 0), Region(CACHE, 64, 128, 64))),
            [Region(CACHE + 64, 64, 128, 0), Region(CACHE, 64, 128, 64)],
        ),
    ],
)
def test_the_runs_of_a_layout(layout, runs):
    assert runs_of(layout.regions) == runs


NHD = Packing(128)


@pytest.mark.parametrize(
    ("layout", "suits"),
    [
        (layers(1, 2 * MIB, 0), True),
        (layers(1, LEAST_RUN_BYTES, 0), True),
        (layers(1, LEAST_RUN_BYTES - 16, 0), False),
        (layers(32, 64 * KIB, 1 << 30), False),
        (layers(32, 2 * MIB, 1 << 30), True),
        (MIXED, True),
        (layers(1, 2 * MIB, 0).packed({"": NHD}), True),  # nothing has that name
    ],
)
def test_which_layouts_a_copy_engine_moves_well(layout, suits):
    assert suits_copy_engine(layout) is suits


def test_only_kernels_pack():
    region = Region(CACHE, 2 * MIB, 2 * MIB, 0, frozenset(["kv"]))
    layout = KVLayout(64, (region,))
    assert suits_copy_engine(layout)
    assert not suits_copy_engine(layout.packed({"kv": NHD}))


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([2, 2, 2, 2, 2], [(0, 4), (4, 5)]),
        ([3, 3, 3], [(0, 2), (2, 3)]),
        ([9, 1, 7, 1], [(0, 1), (1, 3), (3, 4)]),
        ([8], [(0, 1)]),
    ],
)
def test_pieces(sizes, pieces):
    nbytes = np.array(sizes)
    assert Copies(nbytes, nbytes, nbytes).pieces(8) == pieces


@pytest.mark.parametrize("page_bytes", [5 * MIB, 9 * MIB, 8 * MIB + 16, 100 * MIB, 4 * MIB])
def test_pieces_of_long_blocks_are_more_than_half_full(page_bytes):
    layout = layers(1, page_bytes, 0)
    pairs = np.stack([np.arange(20)] * 2, 1).astype(np.int32)
    copies = BlockCutter(layout.regions, arena_of(layout)).cut(pairs, Direction.LOAD)
    ends = np.cumsum(copies.nbytes)
    firsts = [first for first, _ in copies.pieces(8 * MIB)]
    sizes = np.diff([*(ends[firsts] - copies.nbytes[firsts]), ends[-1]])
    assert (sizes <= 8 * MIB).all()
    assert (sizes[:-1] > 4 * MIB).all()
