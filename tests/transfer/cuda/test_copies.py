"""Pairs as copies, against an oracle that goes over every page, and byte by byte."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_swap.cuda.copies import CopyMaker, cut_batches
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region

ARENA = 1 << 30
"""Address of the arena; the KV cache lies below it."""


def make_layout(num_blocks: int, pages: list[tuple[int, int]], gap: int) -> KVLayout:
    """Regions of (page bytes, bytes between pages), one after the other, `gap` bytes apart."""
    regions, address, offset = [], 1 << 20, 0
    for page_bytes, between in pages:
        stride = page_bytes + between
        regions.append(Region(address, page_bytes, stride, offset))
        address += num_blocks * stride + gap
        offset += page_bytes
    return KVLayout(num_blocks, tuple(regions))


@st.composite
def plans(draw: st.DrawFn) -> tuple[CopyMaker, np.ndarray]:
    sixteens = st.integers(1, 5).map(lambda n: 16 * n)
    num_blocks, num_slots = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    pages = draw(st.lists(st.tuples(sixteens, st.sampled_from([0, 0, 32])), min_size=1, max_size=4))
    layout = make_layout(num_blocks, pages, draw(st.sampled_from([0, 48])))
    count = draw(st.integers(1, min(num_blocks, num_slots)))
    # Runs of adjacent blocks and slots are likely: they are what merges.
    ordered = st.integers(0, 3).map(lambda kind: kind > 0)
    columns = []
    for size in (num_blocks, num_slots):
        if draw(ordered):
            first = draw(st.integers(0, size - count))
            columns.append(list(range(first, first + count)))
        else:
            columns.append(draw(st.permutations(range(size)))[:count])
    rows = draw(st.permutations(list(zip(*columns, strict=True))))
    boundary = 16 * draw(st.integers(1, 40))
    max_bytes = 16 * draw(st.integers(1, 40))
    return CopyMaker(layout, ARENA, boundary, max_bytes), np.array(rows, np.int32)


def naive(plan: CopyMaker, pairs: np.ndarray) -> dict[int, int]:
    """For every byte in host memory, the byte of the KV cache that belongs to it."""
    bytes_of = {}
    for block, slot in pairs.tolist():
        for region in plan.layout.regions:
            device = region.address + block * region.block_stride_bytes
            host = plan.arena_address + slot * plan.layout.slot_bytes + region.slot_offset_bytes
            bytes_of.update(
                zip(range(host, host + region.page_bytes), range(device, 1 << 60), strict=False)
            )
    return bytes_of


def split(direction: Direction, copies: np.ndarray) -> list[tuple[int, int, int]]:
    """Copies as (host, device, bytes)."""
    destinations, sources, nbytes = copies.tolist()
    host, device = (
        (sources, destinations) if direction is Direction.LOAD else (destinations, sources)
    )
    return list(zip(host, device, nbytes, strict=True))


@settings(max_examples=400, deadline=None)
@given(plans(), st.sampled_from(list(Direction)))
def test_copies_move_every_byte_once_within_the_limits(
    case: tuple[CopyMaker, np.ndarray], direction: Direction
) -> None:
    plan, pairs = case
    copies = plan.copies(direction, pairs)
    moved: dict[int, int] = {}
    for host, device, nbytes in split(direction, copies):
        assert 0 < nbytes <= plan.max_bytes
        first, last = host - plan.arena_address, host - plan.arena_address + nbytes - 1
        assert first // plan.boundary_bytes == last // plan.boundary_bytes
        for offset in range(nbytes):
            assert host + offset not in moved
            moved[host + offset] = device + offset
    assert moved == naive(plan, pairs)


@settings(max_examples=200, deadline=None)
@given(plans(), st.sampled_from(list(Direction)))
def test_nothing_that_could_be_one_copy_is_two(
    case: tuple[CopyMaker, np.ndarray], direction: Direction
) -> None:
    plan, pairs = case
    plan = CopyMaker(plan.layout, plan.arena_address, 1 << 40, 1 << 40)
    copies = split(direction, plan.copies(direction, pairs))
    assert copies == sorted(copies)
    for (host, device, nbytes), (next_host, next_device, _) in pairwise(copies):
        assert (host + nbytes, device + nbytes) != (next_host, next_device)


def test_adjacent_blocks_in_adjacent_slots_are_one_copy() -> None:
    plan = CopyMaker(make_layout(16, [(64, 0)], 0), ARENA, 1 << 20, 1 << 20)
    pairs = np.array([[6, 3], [4, 1], [5, 2], [9, 7]], np.int32)
    first = plan.layout.regions[0].address
    assert split(Direction.STORE, plan.copies(Direction.STORE, pairs)) == [
        (ARENA + 64, first + 4 * 64, 3 * 64),
        (ARENA + 7 * 64, first + 9 * 64, 64),
    ]


def test_a_copy_ends_at_a_registration_and_at_the_largest_size() -> None:
    plan = CopyMaker(make_layout(8, [(64, 0)], 0), ARENA, 96, 48)
    pairs = np.stack([np.arange(4)] * 2, 1).astype(np.int32)
    copies = split(Direction.LOAD, plan.copies(Direction.LOAD, pairs))
    assert [(host - ARENA, nbytes) for host, _, nbytes in copies] == [
        (0, 48),
        (48, 48),
        (96, 48),
        (144, 48),
        (192, 48),
        (240, 16),
    ]


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([10], [(0, 1)]),
        ([10, 10, 10], [(0, 2), (2, 3)]),
        ([25, 5, 5, 5, 5], [(0, 1), (1, 4), (4, 5)]),
        ([20, 20, 1], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_batches_keep_both_limits_and_hold_at_least_a_copy(
    sizes: list[int], batches: list[tuple[int, int]]
) -> None:
    copies = np.array([sizes] * 3, np.int64)
    assert cut_batches(copies, max_copies=3, max_bytes=20) == batches
