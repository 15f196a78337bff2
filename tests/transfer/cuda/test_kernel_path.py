"""The path of the kernels: how jobs are cut, and that no list is overwritten while it is read."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda import kernel_path as kernel
from kv_swap.cuda.kernel_path import KernelPath
from kv_swap.cuda.swap import LIST_BYTES, MAX_PAIRS
from kv_swap.cuda.tiles import Tiles
from kv_swap.engine import Direction

from tests.support.registrars import Registrar


class FakeKernel:
    """Notes which list a launch reads; `read` looks at it when the launch runs, later."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.tiles: list[Tiles | None] = []
        self.failing = False

    def launch(
        self, direction: Direction, list_address: int, stream: object, tiles: Tiles | None = None
    ) -> None:
        assert direction is Direction.STORE
        self.tiles.append(tiles)
        if self.failing:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self.launched.append(list_address)

    def read(self, index: int) -> list[list[int]]:
        words = np.frombuffer(ctypes.string_at(self.launched[index], LIST_BYTES), np.int32)
        pairs: list[list[int]] = words[4 : 4 + 2 * words[0]].reshape(-1, 2).tolist()
        return pairs


class FakeTable:
    """Waves of as many bytes each."""

    def __init__(self, wave_bytes: int, num_waves: int) -> None:
        self.wave_bytes = [wave_bytes] * num_waves

    def tiles(self, waves: range) -> Tiles:
        return Tiles(1000 + waves.start, len(waves), 1)


STREAM: Any = object()


def make_path(slot_bytes: int, num_waves: int = 1) -> tuple[KernelPath, FakeKernel]:
    fake: Any = FakeKernel()
    table: Any = FakeTable(slot_bytes // num_waves, num_waves)
    return KernelPath(Direction.STORE, fake, slot_bytes, Registrar(), table), fake


def make_pairs(count: int) -> np.ndarray:
    return np.arange(2 * count, dtype=np.int32).reshape(-1, 2)


@pytest.mark.parametrize(
    ("slot_bytes", "pairs"), [(16, MAX_PAIRS), (1 << 30, 1), (128 << 20, 2), (80 << 20, 3)]
)
def test_slices_are_bounded_in_pairs_and_bytes(slot_bytes: int, pairs: int) -> None:
    path, _ = make_path(slot_bytes)
    slices = [part for _, part in path.slices(make_pairs(pairs + 1), in_waves=False)]
    assert [len(part) for part in slices] == [pairs, 1]
    np.testing.assert_array_equal(np.concatenate(slices), make_pairs(pairs + 1))


def test_lists_of_slices_in_flight_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "RING_ENTRIES", 3)
    path, fake = make_path(16)
    for count in range(1, 8):
        path.queue((None, make_pairs(count)), STREAM)
        for ago in range(min(count, path.max_in_flight)):
            assert fake.read(count - 1 - ago) == make_pairs(count - ago).tolist()
    assert len(set(fake.launched)) == 3


def test_a_failed_launch_takes_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "RING_ENTRIES", 2)
    path, fake = make_path(16)
    path.queue((None, make_pairs(1)), STREAM)
    fake.failing = True
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        path.queue((None, make_pairs(2)), STREAM)
    fake.failing = False
    path.queue((None, make_pairs(3)), STREAM)
    assert fake.read(0) == make_pairs(1).tolist()
    assert fake.read(1) == make_pairs(3).tolist()


def test_warm_up_launches_an_empty_list() -> None:
    path, fake = make_path(16)
    path.warm_up(STREAM)
    assert fake.read(0) == []


# -- waves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wave_bytes", "joined"),
    [(64 << 20, [range(i, i + 1) for i in range(4)]), (128 << 10, [range(3), range(3, 4)])],
)
def test_waves_are_launched_with_their_tiles(wave_bytes: int, joined: list[range]) -> None:
    """The first waves of small slots are joined."""
    path, fake = make_path(4 * wave_bytes, num_waves=4)
    slices = list(path.slices(make_pairs(3), in_waves=True))
    assert [waves for waves, _ in slices] == joined
    for part in slices:
        path.queue(part, STREAM)
    assert fake.tiles == [Tiles(1000 + waves.start, len(waves), 1) for waves in joined]
    for index in range(len(joined)):
        assert fake.read(index) == make_pairs(3).tolist()
    path.queue((None, make_pairs(1)), STREAM)
    assert fake.tiles[-1] is None


@pytest.mark.parametrize(
    ("slot_bytes", "launches"),
    [(256 << 10, 1), (512 << 10, 2), (1 << 20, 3), (1536 << 10, 4), (8 << 20, 4)],
)
def test_pieces_of_slots_are_not_too_small(slot_bytes: int, launches: int) -> None:
    path, _ = make_path(slot_bytes, num_waves=4)
    ranges = [waves for waves, _ in path.slices(make_pairs(1), in_waves=True)]
    assert len(ranges) == launches
    assert [wave for waves in ranges for wave in waves] == [0, 1, 2, 3]
    assert all(len(waves) == 1 for waves in ranges[1:])
