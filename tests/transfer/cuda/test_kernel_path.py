"""The path of the kernels: how jobs are cut. `test_engine.py` shows what is copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.kernel_path import KernelPath
from kv_swap.cuda.swap import MAX_PAIRS
from kv_swap.engine import Direction

from tests.support.registrars import Registrar

MIB = 1 << 20


def make_path(slot_bytes: int) -> KernelPath:
    """A path with four waves of as many bytes each."""
    nothing: Any = None
    table: Any = SimpleNamespace(wave_bytes=[slot_bytes // 4] * 4)
    return KernelPath(Direction.LOAD, nothing, slot_bytes, Registrar(), table)


def make_pairs(count: int) -> np.ndarray:
    return np.arange(2 * count, dtype=np.int32).reshape(-1, 2)


@pytest.mark.parametrize(
    ("slot_bytes", "pairs"), [(16, MAX_PAIRS), (1 << 30, 1), (128 * MIB, 2), (80 * MIB, 3)]
)
def test_slices_are_bounded_in_pairs_and_bytes(slot_bytes: int, pairs: int) -> None:
    path = make_path(slot_bytes)
    slices = [part for _, part in path.slices(make_pairs(pairs + 1), in_waves=False)]
    assert [len(part) for part in slices] == [pairs, 1]
    np.testing.assert_array_equal(np.concatenate(slices), make_pairs(pairs + 1))


@pytest.mark.parametrize(
    ("slot_bytes", "first", "counts"),
    [
        (256 << 10, 4, [5]),
        (512 << 10, 3, [5]),
        (MIB, 2, [5]),
        (1536 << 10, 1, [5]),
        (256 * MIB, 1, [4, 1]),
    ],
)
def test_the_first_waves_are_joined_where_slots_are_small(
    slot_bytes: int, first: int, counts: list[int]
) -> None:
    slices = make_path(slot_bytes).slices(make_pairs(5), in_waves=True)
    ranges = [range(first), *(range(i, i + 1) for i in range(first, 4))]
    expected = [(waves, count) for waves in ranges for count in counts]
    assert [(waves, len(part)) for waves, part in slices] == expected
