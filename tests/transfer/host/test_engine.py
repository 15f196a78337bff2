from __future__ import annotations

import ctypes
import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from kv_swap.errors import CopyError
from kv_swap.host import transfers
from kv_swap.host.transfers import CopyRun, copy_runs
from kv_swap.layout import KVLayout
from numpy.typing import NDArray

from tests.support.children import passes_in_a_child
from tests.support.kv_memory import Storage
from tests.support.swap_contract import BLOCKS, LOAD, STORE, WAVES, HostBed

FIRST = 200
"""What the bytes of blocks are before a load in waves; those of slots are smaller."""


def copy_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-swap-copy"]


@pytest.fixture(autouse=True)
def no_thread_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        return  # what failed holds its engine, whose thread would be waited for in vain
    gc.collect()
    for thread in copy_threads():
        thread.join(120)
    assert not copy_threads()


class OneRegion(HostBed):
    """Pages of 64 bytes in one region, side by side or 16 bytes apart."""

    stride = 64

    def make_cache(self) -> KVLayout:
        self.storage = Storage(BLOCKS * self.stride)
        pages = self.storage.describe("kv", BLOCKS, (BLOCKS, 64), (self.stride, 1))
        return KVLayout.from_tensors(BLOCKS, [pages])

    @property
    def _pages(self) -> NDArray[np.uint8]:
        return self.storage.data.reshape(1, BLOCKS, self.stride)[:, :, :64]

    def write(self, blocks: NDArray[np.uint8]) -> None:
        self._pages[0] = blocks

    def read(self) -> NDArray[np.uint8]:
        return self._pages[0].copy()


class Spaced(OneRegion):
    stride = 80


class Gate:
    """Stands in for `copy_runs`: holds every slice until opened; records the runs."""

    def __init__(self, copy: Callable[[Sequence[CopyRun]], None]) -> None:
        self.copy = copy
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()
        self.runs: list[CopyRun] = []

    def __call__(self, runs: Sequence[CopyRun]) -> None:
        self.runs.extend(runs)
        self.reached.release()
        assert self.opened.wait(120)
        self.copy(runs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(transfers.copy_runs)
    monkeypatch.setattr(transfers, "copy_runs", gate)
    yield gate
    gate.opened.set()


@pytest.mark.parametrize("bed_of", [OneRegion, Spaced])
def test_pages_and_slots_that_are_side_by_side_are_one_run(gate, bed_of):
    bed = bed_of()
    gate.opened.set()
    blocks, slots = bed.randomize()
    bed.submit(1, STORE, (3, 1), (2, 0), (4, 2), (6, 4), (7, 6))
    (done,) = bed.finish()
    assert (done.nbytes, done.error) == (5 * 64, None)
    slots[[1, 0, 2, 4, 6]] = blocks[[3, 2, 4, 6, 7]]
    np.testing.assert_array_equal(bed.arena.view(), slots)
    arena, cache = bed.arena.address, bed.storage.address
    if bed_of is Spaced:
        assert sorted(gate.runs) == [
            (arena + slot * 64, cache + block * 80, 64)
            for block, slot in ((2, 0), (3, 1), (4, 2), (6, 4), (7, 6))
        ]
    else:
        assert gate.runs == [
            (arena, cache + 2 * 64, 3 * 64),
            (arena + 4 * 64, cache + 6 * 64, 64),
            (arena + 6 * 64, cache + 7 * 64, 64),
        ]
    bed.close()


def test_load_waits_for_one_slice_of_a_store(gate, monkeypatch):
    monkeypatch.setattr(transfers, "SLICE_BYTES", 128)
    bed = Spaced()
    bed.submit(1, STORE, *((i, i) for i in range(6)))
    assert gate.reached.acquire(timeout=120)
    bed.submit(2, LOAD, (10, 6), (11, 7))
    gate.opened.set()
    assert [completion.job_id for completion in bed.finish()] == [2, 1]
    into_cache = range(bed.storage.address, bed.storage.address + len(bed.storage.data))
    first_load = next(i for i, (dst, _, _) in enumerate(gate.runs) if dst in into_cache)
    assert sum(nbytes for _, _, nbytes in gate.runs[:first_load]) <= 128
    bed.close()


def test_dropping_everything_in_mid_copy(gate):
    bed = HostBed()
    blocks, _ = bed.randomize()
    surviving = bed.arena.view()
    owner, kept = weakref.ref(bed.arena._owner), weakref.ref(bed.token)
    facade = weakref.ref(bed.engine)
    bed.submit(1, STORE, (2, 3))
    assert gate.reached.acquire(timeout=120)
    (thread,) = copy_threads()
    del bed
    gc.collect()
    assert facade() is None
    assert kept() is not None
    gate.opened.set()
    thread.join(120)
    assert not thread.is_alive()
    gc.collect()
    assert kept() is None
    np.testing.assert_array_equal(surviving[3], blocks[2])
    assert owner() is not None
    del surviving
    gc.collect()
    assert owner() is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_may_drop_an_engine_whose_lock_was_taken_at_the_fork():
    engine = HostBed().engine
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._state.condition:
            held.set()
            assert forked.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(120)

    def drop() -> None:
        nonlocal engine
        del engine
        gc.collect()

    passes = passes_in_a_child(drop)
    forked.set()
    holder.join()
    assert passes
    del drop, hold, holder
    engine.close()


def test_wait_and_in_flight(gate):
    bed = HostBed()
    engine = bed.engine
    assert engine.wait(0)
    assert engine.poll() == []
    bed.submit(1, STORE, (2, 3))
    assert engine.in_flight == 1
    started = time.perf_counter()
    assert not engine.wait(0.05)
    assert time.perf_counter() - started >= 0.05
    assert engine.poll() == []
    gate.opened.set()
    assert engine.wait(120)
    assert engine.in_flight == 1
    (done,) = engine.poll()
    assert done.seconds >= 0.05, "so long the gate was closed"
    assert engine.in_flight == 0
    assert engine.poll() == []
    bed.close()


def test_more_runs_than_one_call_takes():
    source = np.random.default_rng(0).integers(0, 256, (3000, 16), np.uint8)
    target = np.zeros_like(source)
    base = source.ctypes.data
    copy_runs([(target.ctypes.data + 16 * i, base + 16 * (2999 - i), 16) for i in range(3000)])
    assert (target == source[::-1]).all()


def test_a_copy_that_stops_half_way_is_an_error():
    source, target = np.ones(64, np.uint8), np.zeros(128, np.uint8)
    runs = [(target.ctypes.data, source.ctypes.data, 64), (target.ctypes.data + 64, 8, 64)]
    with pytest.raises(OSError, match="64 of 128 bytes"):
        copy_runs(runs)


def test_where_the_kernel_forbids_the_call_runs_are_copied_one_by_one(monkeypatch):
    def forbidden(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr("kv_swap.host.transfers._read_memory", forbidden)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    copy_runs([(target.ctypes.data, source.ctypes.data, 64)])
    assert (target == source).all()


# -- waves -------------------------------------------------------------------------------------


@pytest.fixture
def bed() -> Iterator[HostBed]:
    """An engine of two layers of K and V whose waves are V, then K, of both layers."""
    made = HostBed()
    made.engine.set_waves(WAVES)
    yield made
    made.close()


def arrived(bed: HostBed, block: int, slot: int) -> list[bool]:
    """Say for each region whether a block has the bytes of a slot there; else it has its first."""
    page, wanted = (a.reshape(4, -1) for a in (bed.read()[block], bed.arena.view()[slot]))
    found = (page == wanted).all(axis=1)
    assert (page[~found] == FIRST).all()
    return found.tolist()


def fill(bed: HostBed) -> None:
    """Have blocks whose bytes no slot has."""
    bed.arena.view()[:] = np.random.default_rng(1).integers(1, FIRST, bed.arena.view().shape)
    bed.write(np.full_like(bed.read(), FIRST))


def test_seconds_are_those_of_the_copies(bed, monkeypatch):
    """Each of three waves takes a second; there is an hour between them."""
    clock = 0.0

    def copy_for_a_second(runs: Sequence[CopyRun]) -> None:
        nonlocal clock
        clock += 1
        copy_runs(runs)

    monkeypatch.setattr(transfers, "copy_runs", copy_for_a_second)
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    bed.load_in_waves(7, (2, 3))
    for wave in (1, 2):
        clock += 3600
        bed.engine.await_wave(wave)
    (done,) = bed.engine.poll()
    assert done.seconds == 3


def test_a_load_that_fails_is_told_and_leaves_the_next_one_alone(bed, monkeypatch):
    def fail(_runs: Sequence[CopyRun]) -> None:
        raise OSError("injected fault")

    def load_now(*pairs: tuple[int, int]) -> None:
        bed.engine.load_now(np.array(pairs, np.int32))

    fill(bed)
    bed.load_in_waves(7, (2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "copy_runs", fail)
        for _ in range(2):
            with pytest.raises(CopyError, match=r"injected fault.*load job 7 of 64 bytes"):
                bed.engine.await_wave(1)
    load_now((2, 3))
    assert arrived(bed, 2, 3) == [True] * 4
    bed.engine.await_wave(2)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "copy_runs", fail)
        bed.load_in_waves(8, (1, 0))
        with pytest.raises(CopyError, match="injected fault"):
            load_now((1, 0))
        bed.load_in_waves(9, (1, 0))
    bed.load_in_waves(10, (0, 1))
    bed.engine.await_wave(0)
    bed.engine.await_wave(2)
    assert arrived(bed, 0, 1) == [True] * 4
    ended = [(done.job_id, type(done.error)) for done in bed.engine.poll()]
    assert ended == [(7, CopyError), (8, CopyError), (9, CopyError), (10, type(None))]


def test_a_load_at_once_ends_the_load_that_it_replaces(bed):
    """What is left of that must not write once the forward has gone on."""
    fill(bed)
    bed.load_in_waves(7, (2, 3))
    bed.engine.load_now(np.array([(2, 3)], np.int32))
    assert arrived(bed, 2, 3) == [True] * 4
    bed.write(np.zeros_like(bed.read()))
    (done,) = bed.finish()
    assert (done.job_id, type(done.error)) == (7, CopyError)
    assert not bed.read().any()
