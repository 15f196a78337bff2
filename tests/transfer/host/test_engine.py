from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError
from kv_swap.host import transfers
from kv_swap.host.engine import HostSwapEngine
from kv_swap.host.transfers import Run, copy_runs
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

from tests.support.kv_memory import Storage, expect_copied, region_bytes

LOAD, STORE = Direction.LOAD, Direction.STORE


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


def halves(num_blocks: int, page_bytes: int) -> tuple[KVLayout, Storage]:
    """Two layers with K and V outside the blocks: two regions a layer."""
    half_bytes = num_blocks * page_bytes
    storage = Storage(4 * half_bytes)
    shape, strides = (2, num_blocks, page_bytes), (half_bytes, page_bytes, 1)
    tensors = [
        storage.describe(str(first), num_blocks, shape, strides, block_dim=1, offset=first)
        for first in (0, 2 * half_bytes)
    ]
    return KVLayout.from_tensors(num_blocks, tensors), storage


def packed(num_blocks: int, page_bytes: int, stride: int) -> tuple[KVLayout, Storage]:
    """One region whose pages are contiguous (stride == page) or spaced."""
    storage = Storage(num_blocks * stride)
    tensor = storage.describe("kv", num_blocks, (num_blocks, page_bytes), (stride, 1))
    return KVLayout.from_tensors(num_blocks, [tensor]), storage


def make_engine(
    cache: tuple[KVLayout, Storage], num_slots: int, *kept: object
) -> tuple[HostSwapEngine, HostArena, Storage]:
    """An engine over a cache and an arena of its own; it keeps `kept` alive besides."""
    layout, storage = cache
    arena = HostArena(num_slots, layout.slot_bytes, register=None)
    return HostSwapEngine(layout, arena, [storage.data, *kept]), arena, storage


def job(job_id: int, direction: Direction, pairs: list[tuple[int, int]]) -> SwapJob:
    return SwapJob(job_id, direction, np.array(pairs, np.int32))


def finish(engine: HostSwapEngine) -> list[Completion]:
    assert engine.wait(120)
    return engine.poll()


class Gate:
    """Stands in for `copy_runs`: holds every slice until opened; records the runs."""

    def __init__(self, copy: Callable[[Sequence[Run]], None]) -> None:
        self.copy = copy
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()
        self.runs: list[Run] = []

    def __call__(self, runs: Sequence[Run]) -> None:
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


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.sampled_from(["halves", "packed", "spaced"]),
    direction=st.sampled_from([LOAD, STORE]),
    num_blocks=st.integers(2, 12),
    num_slots=st.integers(1, 12),
    pages=st.integers(1, 20),
)
def test_moves_exactly_the_blocks_of_the_pairs(
    data, shape, direction, num_blocks, num_slots, pages
):
    page_bytes = 16 * pages
    if shape == "halves":
        layout, storage = halves(num_blocks, page_bytes)
    else:
        spacing = 32 if shape == "spaced" else 0
        layout, storage = packed(num_blocks, page_bytes, page_bytes + spacing)
    # Destinations are unique, sources may repeat.
    count = data.draw(st.integers(1, num_slots if direction is STORE else num_blocks))
    blocks = st.integers(0, num_blocks - 1)
    slots = st.integers(0, num_slots - 1)
    pairs = list(
        zip(
            data.draw(st.lists(blocks, min_size=count, max_size=count, unique=direction is LOAD)),
            data.draw(st.lists(slots, min_size=count, max_size=count, unique=direction is STORE)),
            strict=True,
        )
    )
    arena = HostArena(num_slots, layout.slot_bytes, register=None)
    view = arena.view()
    rng = np.random.default_rng(count)
    storage.data[:] = rng.integers(0, 256, len(storage.data), np.uint8)
    view[:] = rng.integers(0, 256, view.shape, np.uint8)
    expected_data, expected_view = expect_copied(layout, storage, view, direction, pairs)
    engine = HostSwapEngine(layout, arena, [storage.data])
    submitted = job(5, direction, pairs)
    engine.submit(submitted)
    submitted.pairs[:] = 0  # the caller may reuse them
    (done,) = finish(engine)
    engine.close()
    np.testing.assert_array_equal(storage.data, expected_data)
    np.testing.assert_array_equal(view, expected_view)
    assert done == Completion(5, direction, count * layout.slot_bytes, done.seconds)
    assert done.seconds > 0


def test_adjacent_pages_are_one_run(gate):
    engine, arena, storage = make_engine(packed(8, 64, 64), 8)
    gate.opened.set()
    engine.submit(job(1, STORE, [(3, 1), (2, 0), (4, 2), (6, 4), (7, 6)]))
    finish(engine)
    base = storage.address
    assert gate.runs == [
        (arena.address, base + 2 * 64, 3 * 64),
        (arena.address + 4 * 64, base + 6 * 64, 64),
        (arena.address + 6 * 64, base + 7 * 64, 64),
    ]


def test_load_waits_for_one_slice_of_a_store(gate, monkeypatch):
    monkeypatch.setattr(transfers, "SLICE_BYTES", 256)
    engine, _, storage = make_engine(packed(40, 64, 80), 40)
    engine.submit(job(1, STORE, [(i, i) for i in range(20)]))
    assert gate.reached.acquire(timeout=120)
    engine.submit(job(2, LOAD, [(30, 30), (31, 31)]))
    gate.opened.set()
    completions = finish(engine)
    assert [completion.job_id for completion in completions] == [2, 1]
    into_cache = range(storage.address, storage.address + len(storage.data))
    first_load = next(i for i, (dst, _, _) in enumerate(gate.runs) if dst in into_cache)
    assert sum(nbytes for _, _, nbytes in gate.runs[:first_load]) <= 256


class Token:
    """Stands for a KV tensor in `keep_alive`."""


def test_dropping_everything_in_mid_copy(gate):
    token = Token()
    engine, arena, storage = make_engine(halves(4, 64), 4, token)
    storage.data[:] = np.arange(len(storage.data)) % 251
    expected = storage.data[region_bytes(engine.layout, storage, 2)].copy()
    surviving = arena.view()
    owner, kept = weakref.ref(arena._owner), weakref.ref(token)
    facade = weakref.ref(engine)
    engine.submit(job(1, STORE, [(2, 3)]))
    assert gate.reached.acquire(timeout=120)
    (thread,) = copy_threads()
    del engine, arena, token
    gc.collect()
    assert facade() is None
    assert kept() is not None
    gate.opened.set()
    thread.join(120)
    assert not thread.is_alive()
    gc.collect()
    assert kept() is None
    np.testing.assert_array_equal(surviving[3], expected)
    assert owner() is not None
    del surviving
    gc.collect()
    assert owner() is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_may_drop_an_engine_whose_lock_was_taken_at_the_fork():
    engine, _, _ = make_engine(packed(4, 64, 64), 4)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._state.condition:
            held.set()
            assert forked.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(120)
    child = os.fork()
    if child == 0:
        # A failure must not run the rest of the tests in the child, nor wait. The handler of
        # pytest-timeout would raise within a finaliser, where nobody hears of it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            del engine
            gc.collect()
            os._exit(0)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 0
    del hold, holder
    engine.close()


def test_wait_and_in_flight(gate):
    engine, _, _ = make_engine(packed(4, 64, 64), 4)
    assert engine.wait(0)
    assert engine.poll() == []
    engine.submit(job(1, STORE, [(2, 3)]))
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


def in_waves(job_id: int, pairs: list[tuple[int, int]]) -> SwapJob:
    return SwapJob(job_id, LOAD, np.array(pairs, np.int32), before_compute=True, in_waves=True)


Waves = tuple[HostSwapEngine, Storage, np.ndarray]


@pytest.fixture
def waves() -> Iterator[Waves]:
    """An engine of two layers of K and V whose waves are V, then K, of both layers."""
    engine, arena, storage = make_engine(halves(4, 32), 4)
    view = arena.view()
    view[:] = np.random.default_rng(1).integers(1, 256, view.shape, np.uint8)
    engine.set_waves([[1, 3], [0], [2]])
    yield engine, storage, view
    engine.close()


def arrived(engine: HostSwapEngine, storage: Storage, block: int, slot: np.ndarray) -> list[bool]:
    """Say for each region whether a block has the bytes of a slot there."""
    found = []
    for region in engine.layout.regions:
        first = region.address - storage.address + block * region.block_stride_bytes
        page = storage.data[first : first + region.page_bytes]
        offset = region.slot_offset_bytes
        same = bool((page == slot[offset : offset + region.page_bytes]).all())
        assert same or not page.any()
        found.append(same)
    return found


def test_a_wave_is_there_when_it_was_awaited(waves):
    engine, storage, view = waves
    engine.submit(in_waves(7, [(2, 3), (0, 1)]))
    for block, slot in ((2, 3), (0, 1)):
        assert arrived(engine, storage, block, view[slot]) == [False, True, False, True]
    assert engine.poll() == []
    engine.await_wave(1)
    engine.await_wave(0)
    assert arrived(engine, storage, 2, view[3]) == [True, True, False, True]
    engine.await_wave(2)
    assert arrived(engine, storage, 0, view[1]) == [True] * 4
    (done,) = engine.poll()
    assert (done.job_id, done.error, done.nbytes) == (7, None, 2 * engine.layout.slot_bytes)
    assert engine.in_flight == 0
    engine.await_wave(2)
    assert engine.poll() == []


def test_seconds_are_those_of_the_copies(waves, monkeypatch):
    """Each of three waves takes a second; there is an hour between them."""
    engine, _, _ = waves
    clock = 0.0

    def copy_for_a_second(runs: Sequence[Run]) -> None:
        nonlocal clock
        clock += 1
        copy_runs(runs)

    monkeypatch.setattr(transfers, "copy_runs", copy_for_a_second)
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    engine.submit(in_waves(7, [(2, 3)]))
    for wave in (1, 2):
        clock += 3600
        engine.await_wave(wave)
    (done,) = engine.poll()
    assert done.seconds == 3


def test_a_load_that_fails_is_told_and_leaves_the_next_one_alone(waves, monkeypatch):
    def fail(_runs: Sequence[Run]) -> None:
        raise OSError("injected fault")

    engine, storage, view = waves
    engine.submit(in_waves(7, [(2, 3)]))
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "copy_runs", fail)
        for _ in range(2):
            with pytest.raises(CopyError, match=r"injected fault.*load job 7 of 32 bytes"):
                engine.await_wave(1)
    engine.load_now(in_waves(7, [(2, 3)]).pairs)
    assert arrived(engine, storage, 2, view[3]) == [True] * 4
    engine.await_wave(2)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "copy_runs", fail)
        engine.submit(in_waves(8, [(1, 0)]))
        with pytest.raises(CopyError, match="injected fault"):
            engine.load_now(in_waves(8, [(1, 0)]).pairs)
        engine.submit(in_waves(9, [(1, 0)]))
    engine.submit(in_waves(10, [(0, 1)]))
    engine.await_wave(0)
    engine.await_wave(2)
    assert arrived(engine, storage, 0, view[1]) == [True] * 4
    ended = [(done.job_id, type(done.error)) for done in engine.poll()]
    assert ended == [(7, CopyError), (8, CopyError), (9, CopyError), (10, type(None))]


def test_a_load_at_once_ends_the_load_that_it_replaces(waves):
    """What is left of that must not write once the forward has gone on."""
    engine, storage, view = waves
    engine.submit(in_waves(7, [(2, 3)]))
    engine.load_now(in_waves(7, [(2, 3)]).pairs)
    assert arrived(engine, storage, 2, view[3]) == [True] * 4
    written = region_bytes(engine.layout, storage, 2)
    storage.data[written] = 0
    (done,) = finish(engine)
    assert (done.job_id, type(done.error)) == (7, CopyError)
    assert not storage.data[written].any()
