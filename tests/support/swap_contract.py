"""Tests that every swap engine must pass: on the host, on a played CUDA device and on a real one.

A test module has a class that inherits `SwapContract`, and a fixture `beds` that makes beds of its
engine. Other features of an engine, and the order in which a device works, are tested there.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import JobError, LayoutError
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import whole_pages
from numpy.typing import NDArray

from tests.support.kv_memory import Storage
from tests.support.waiting import wait_until

LOAD, STORE = Direction.LOAD, Direction.STORE
BLOCKS, SLOTS = 12, 8
WAVES = [[1, 3], [0], [2]]
"""Waves over four regions."""
WINDOWS = 3


class Token:
    """Stands for a KV tensor in `keep_alive`."""


class Bed(ABC):
    """An engine over `BLOCKS` blocks of four regions, filled with 3, and `SLOTS` slots."""

    engine: SwapEngine
    arena: HostArena

    def __init__(self, slot_bytes: int | None = None) -> None:
        """Build the engine, over an arena whose slots have `slot_bytes`, if given."""
        self.token = Token()
        layout = self.make_cache()
        self.arena = self.make_arena(SLOTS, slot_bytes or layout.slot_bytes)
        self.engine = self.make_engine(layout, self.arena)
        self.write(np.full((BLOCKS, layout.slot_bytes), 3, np.uint8))

    @abstractmethod
    def make_cache(self) -> KVLayout:
        """Make the KV cache."""

    @abstractmethod
    def make_arena(self, num_slots: int, slot_bytes: int) -> HostArena:
        """Make host memory that the engine can use, with `WINDOWS` windows."""

    @abstractmethod
    def make_engine(self, layout: KVLayout, arena: HostArena) -> SwapEngine:
        """Make the engine, which keeps `token` alive."""

    @abstractmethod
    def write(self, blocks: NDArray[np.uint8]) -> None:
        """Set the bytes of all blocks, region after region, `(BLOCKS, slot_bytes)`."""

    @abstractmethod
    def read(self) -> NDArray[np.uint8]:
        """Return a copy of the bytes of all blocks, once queued compute has run."""

    def settle(self) -> None:
        """Wait for all copies to end."""
        assert self.engine.wait(120)

    def finish(self) -> list[Completion]:
        """Wait for all copies to end, and return their completions."""
        self.settle()
        return self.engine.poll()

    def close(self) -> None:
        self.engine.close()

    def submit(self, job_id: int, direction: Direction, *pairs: Any, **how: bool) -> None:
        self.engine.submit(SwapJob(job_id, direction, np.array(pairs, np.int32), **how))

    def attach(self, window: int, path: Path) -> NDArray[np.uint8]:
        """Attach an arena of random slots in a file, and return the slots once they are ready."""
        slot_bytes = self.engine.layout.slot_bytes
        slots = np.random.default_rng(window).integers(0, 256, (SLOTS, slot_bytes), np.uint8)
        path.write_bytes(slots.tobytes().ljust(whole_pages(slots.nbytes), b"\0"))
        windows = self.engine.windows
        assert windows is not None
        windows.attach(window, str(path), SLOTS)
        wait_until(lambda: windows.ready_slots[window] == SLOTS)
        return slots

    def in_window(self, window: int, slot: int) -> int:
        """Return the number by which a load names a slot of a window."""
        assert self.engine.windows is not None
        return (window + 1) * self.engine.windows.window_slots + slot

    def load_in_waves(self, job_id: int, *pairs: Any) -> None:
        self.submit(job_id, LOAD, *pairs, before_compute=True, in_waves=True)

    def randomize(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Fill all blocks and slots with random bytes; return copies of both."""
        rng = np.random.default_rng(1)
        blocks = rng.integers(0, 256, (BLOCKS, self.engine.layout.slot_bytes), np.uint8)
        self.write(blocks)
        slots = self.arena.view()
        slots[:] = rng.integers(0, 256, slots.shape, np.uint8)
        return blocks, slots.copy()


class NumPyBed(Bed):
    """For engines whose KV cache is NumPy memory: two layers with K and V outside the blocks."""

    page_bytes = 64

    def make_cache(self) -> KVLayout:
        half_bytes = BLOCKS * self.page_bytes
        self.storage = Storage(4 * half_bytes)
        shape, strides = (2, BLOCKS, self.page_bytes), (half_bytes, self.page_bytes, 1)
        describe = self.storage.describe
        tensors = [
            describe(str(first), BLOCKS, shape, strides, block_dim=1, offset=first)
            for first in (0, 2 * half_bytes)
        ]
        return KVLayout.from_tensors(BLOCKS, tensors)

    @property
    def _pages(self) -> NDArray[np.uint8]:
        return self.storage.data.reshape(4, BLOCKS, self.page_bytes)

    def write(self, blocks: NDArray[np.uint8]) -> None:
        self._pages[:] = blocks.reshape(BLOCKS, 4, -1).swapaxes(0, 1)

    def read(self) -> NDArray[np.uint8]:
        return self._pages.swapaxes(0, 1).reshape(BLOCKS, -1).copy()


class HostBed(NumPyBed):
    def make_arena(self, num_slots: int, slot_bytes: int) -> HostArena:
        return HostArena(num_slots, slot_bytes, register=None, num_windows=WINDOWS)

    def make_engine(self, layout: KVLayout, arena: HostArena) -> SwapEngine:
        return HostSwapEngine(layout, arena, [self.storage.data, self.token])


Beds = Callable[..., Bed]


class SwapContract:
    """The tests, for a class with a fixture `beds` to inherit."""

    @pytest.fixture
    def bed(self, beds: Beds) -> Iterator[Bed]:
        made = beds()
        yield made
        vars(made).clear()  # pytest holds the bed for longer than the device exists

    @pytest.mark.parametrize("direction", [STORE, LOAD])
    def test_moves_exactly_the_bytes_of_the_pairs(self, bed: Bed, direction: Direction) -> None:
        """Destinations are unique, sources may repeat."""
        blocks, slots = bed.randomize()
        pairs = np.array([(7, 5), (0, 1), (3, 2), (1, 6), (9, 0)], np.int32)
        pairs[-1, 0 if direction is STORE else 1] = pairs[0, 0 if direction is STORE else 1]
        if direction is STORE:
            slots[pairs[:, 1]] = blocks[pairs[:, 0]]
        else:
            blocks[pairs[:, 0]] = slots[pairs[:, 1]]
        bed.engine.submit(SwapJob(5, direction, pairs))
        nbytes = len(pairs) * bed.engine.layout.slot_bytes
        pairs[:] = 0  # the caller may reuse them
        (done,) = bed.finish()
        assert done == Completion(5, direction, nbytes, done.seconds)
        assert done.seconds > 0
        np.testing.assert_array_equal(bed.arena.view(), slots)
        np.testing.assert_array_equal(bed.read(), blocks)

    def test_many_jobs_in_both_directions(self, bed: Bed) -> None:
        """The blocks and slots of jobs in flight are disjoint."""
        blocks, slots = bed.randomize()
        rng = np.random.default_rng(7)
        held: dict[int, tuple[list[int], list[int]]] = {}
        free_blocks, free_slots = set(range(BLOCKS)), set(range(SLOTS))
        ended = 0
        for job_id in range(200):
            if not free_slots:
                bed.settle()
            for done in bed.engine.poll():
                assert done.error is None
                for free, places in zip(
                    (free_blocks, free_slots), held.pop(done.job_id), strict=True
                ):
                    free.update(places)
                ended += 1
            count = int(rng.integers(1, 1 + min(4, len(free_slots))))
            chosen = tuple(
                rng.choice(sorted(free), count, replace=False).tolist()
                for free in (free_blocks, free_slots)
            )
            held[job_id] = chosen
            free_blocks.difference_update(chosen[0])
            free_slots.difference_update(chosen[1])
            direction = STORE if rng.integers(2) else LOAD
            if direction is STORE:
                slots[chosen[1]] = blocks[chosen[0]]
            else:
                blocks[chosen[0]] = slots[chosen[1]]
            bed.submit(job_id, direction, *zip(*chosen, strict=True))
        ended += len(bed.finish())
        assert ended == 200
        assert bed.engine.in_flight == 0
        np.testing.assert_array_equal(bed.arena.view(), slots)
        np.testing.assert_array_equal(bed.read(), blocks)

    @pytest.mark.parametrize(
        ("direction", "pairs", "message"),
        [
            (STORE, np.zeros((0, 2), np.int32), "non-empty"),
            (STORE, np.zeros(2, np.int32), r"shape \(2,\)"),
            (STORE, np.zeros((1, 2), np.int64), "int64"),
            (STORE, np.array([[0, 0], [12, 1]], np.int32), "pair 1 names block 12, valid are 0 to"),
            (LOAD, np.array([[-1, 0]], np.int32), "pair 0 names block -1"),
            (LOAD, np.array([[0, 8]], np.int32), "pair 0 names slot 8, valid are 0 to 7"),
            (LOAD, np.array([[0, -1]], np.int32), "pair 0 names slot -1"),
            (STORE, np.array([[0, 1], [1, 1]], np.int32), "writes one slot twice"),
            (LOAD, np.array([[i % 4, 0] for i in range(30)], np.int32), "writes one block twice"),
        ],
    )
    def test_bad_pairs_copy_nothing(
        self, bed: Bed, direction: Direction, pairs: Any, message: str
    ) -> None:
        with pytest.raises(JobError, match=message) as caught:
            bed.engine.submit(SwapJob(77, direction, pairs))
        assert "job 77" in str(caught.value)
        assert bed.engine.in_flight == 0
        assert bed.finish() == []
        assert not bed.arena.view().any()
        assert (bed.read() == 3).all()

    def test_a_store_that_does_not_wait_for_compute_is_refused(self, bed: Bed) -> None:
        with pytest.raises(JobError, match="job 77: a store reads what compute wrote"):
            bed.submit(77, STORE, (0, 0), after_compute=False)

    def test_an_arena_that_does_not_fit_is_refused(self, beds: Beds) -> None:
        with pytest.raises(LayoutError, match="slots of the arena have 48 bytes, a block has "):
            beds(slot_bytes=48)

    def test_zero_blocks(self, bed: Bed) -> None:
        blocks, _ = bed.randomize()
        bed.engine.zero_blocks([1, 3])
        blocks[[1, 3]] = 0
        np.testing.assert_array_equal(bed.read(), blocks)
        for wrong, message in (
            ([0, 12], "block 12 does not exist, valid are 0 to 11"),
            ([-1], "-1"),
        ):
            with pytest.raises(JobError, match=message):
                bed.engine.zero_blocks(wrong)
        np.testing.assert_array_equal(bed.read(), blocks)

    def test_a_load_at_once_is_there_when_it_returns(self, bed: Bed) -> None:
        blocks, slots = bed.randomize()
        bed.engine.load_now(np.array([(3, 5), (4, 0)], np.int32))
        blocks[[3, 4]] = slots[[5, 0]]
        np.testing.assert_array_equal(bed.read(), blocks)

    @pytest.mark.parametrize("how", ["async", "before compute", "waves", "at once"])
    def test_loads_read_windows_and_own_slots(
        self, bed: Bed, memory_folder: Path, how: str
    ) -> None:
        blocks, slots = bed.randomize()
        first = bed.attach(0, memory_folder / "first")
        last = bed.attach(WINDOWS - 1, memory_folder / "last")
        named = [bed.in_window(WINDOWS - 1, 5), 2, bed.in_window(0, 7), bed.in_window(0, 2)]
        pairs = list(zip([4, 0, 9, 5], named, strict=True))
        if how == "at once":
            bed.engine.load_now(np.array(pairs, np.int32))
        elif how == "waves":
            bed.engine.set_waves(WAVES)
            bed.load_in_waves(7, *pairs)
            bed.engine.await_wave(len(WAVES) - 1)
        else:
            bed.submit(7, LOAD, *pairs, before_compute=how == "before compute")
        assert [done.error for done in bed.finish()] == [None] * (how != "at once")
        blocks[[4, 0, 9, 5]] = last[5], slots[2], first[7], first[2]
        np.testing.assert_array_equal(bed.read(), blocks)
        np.testing.assert_array_equal(bed.arena.view(), slots)

    def test_only_loads_name_slots_of_windows_and_only_ready_ones(
        self, bed: Bed, memory_folder: Path
    ) -> None:
        bed.attach(1, memory_folder / "peer")
        good = bed.in_window(1, 3)
        bed.submit(6, LOAD, (2, good))
        assert [done.error for done in bed.finish()] == [None]
        loaded = bed.read()
        wrong = [
            bed.in_window(1, SLOTS),  # beyond its slots
            bed.in_window(0, 0),  # not attached
            bed.in_window(WINDOWS, 0),  # no window
            bed.in_window(0, 0) - 1,  # between the arena and the first window
        ]
        jobs = [SwapJob(77, LOAD, np.array([(0, good), (1, slot)], np.int32)) for slot in wrong]
        jobs.append(SwapJob(77, STORE, np.array([(0, 0), (1, good)], np.int32)))
        for job in jobs:
            with pytest.raises(JobError, match=f"pair 1 names slot {job.pairs[1, 1]}, valid are"):
                bed.engine.submit(job)
        with pytest.raises(JobError, match="writes one block twice"):
            bed.submit(77, LOAD, (0, good), (0, good))
        with pytest.raises(JobError, match="pair 1 names block 12"):
            bed.submit(77, LOAD, (0, good), (BLOCKS, good))
        assert bed.engine.windows is not None
        bed.engine.windows.detach(1)
        with pytest.raises(JobError, match=f"pair 0 names slot {good}"):
            bed.submit(77, LOAD, (0, good))
        assert bed.finish() == []
        np.testing.assert_array_equal(bed.read(), loaded)
        assert not bed.arena.view().any()

    def test_close_drops_references_and_keeps_completions(self, bed: Bed) -> None:
        owner, kept = weakref.ref(bed.arena._owner), weakref.ref(bed.token)
        bed.submit(1, STORE, (2, 3))
        assert bed.engine.in_flight == 1
        bed.close()
        del bed.arena, bed.token
        gc.collect()
        assert owner() is None
        assert kept() is None
        assert [completion.job_id for completion in bed.engine.poll()] == [1]
        assert bed.engine.in_flight == 0
        bed.close()
        for call in (
            lambda: bed.submit(2, STORE, (2, 3)),
            lambda: bed.engine.zero_blocks([1]),
            bed.engine.slots,
        ):
            with pytest.raises(JobError, match="closed"):
                call()

    def test_each_wave_is_there_once_it_was_awaited(self, bed: Bed) -> None:
        bed.engine.set_waves(WAVES)
        blocks, slots = bed.randomize()
        bed.load_in_waves(7, (2, 3), (0, 1))
        regions = bed.engine.layout.regions
        for wave, indices in enumerate(WAVES):
            bed.engine.await_wave(wave)
            found = bed.read()
            for region in (regions[index] for index in indices):
                page = slice(region.slot_offset_bytes, region.slot_offset_bytes + region.page_bytes)
                np.testing.assert_array_equal(found[[2, 0], page], slots[[3, 1], page])
        blocks[[2, 0]] = slots[[3, 1]]
        np.testing.assert_array_equal(bed.read(), blocks)
        (done,) = bed.finish()
        assert (done.job_id, done.error) == (7, None)
        assert done.nbytes == 2 * bed.engine.layout.slot_bytes
        bed.engine.await_wave(2)
        assert bed.engine.poll() == []

    @pytest.mark.parametrize("end", ["wait", "close", "submit"])
    def test_waves_that_were_not_awaited_come_before_what_follows(self, bed: Bed, end: str) -> None:
        bed.engine.set_waves(WAVES)
        _, slots = bed.randomize()
        bed.load_in_waves(7, (2, 3))
        if end == "submit":
            bed.load_in_waves(8, (1, 0))
            bed.engine.await_wave(2)
        elif end == "wait":
            bed.settle()
        else:
            bed.close()
        np.testing.assert_array_equal(bed.read()[2], slots[3])
        assert bed.engine.poll()[0].job_id == 7

    def test_waves_that_cannot_be_are_refused(self, bed: Bed) -> None:
        with pytest.raises(JobError, match="only once those were set"):
            bed.load_in_waves(1, (0, 0))
        for wrong in ([[0, 1], [2]], [[0, 1], [2, 3, 3]], [[0, 1, 2, 3], []], [[0, 1, 2, 4]], []):
            with pytest.raises(JobError, match="each of 4 regions once"):
                bed.engine.set_waves(wrong)
        bed.engine.set_waves(WAVES)
        with pytest.raises(JobError, match="set once"):
            bed.engine.set_waves(WAVES)
        with pytest.raises(JobError, match="loads before compute"):
            bed.submit(1, LOAD, (0, 0), in_waves=True)
        assert bed.engine.in_flight == 0
