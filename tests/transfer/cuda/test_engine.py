"""The engine on a played device: what comes before what, and the bytes that show it.

tests/gpu has the same on a real one. Here copies run as far ahead of compute as they are let, or
compute ahead of copies, so a wait that is missing shows in every run.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from kv_swap.cuda import gated, state, swap
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.cuda.kernel_families import (
    BULK,
    BULK_SMALL,
    VECTOR,
    choose_family,
)
from kv_swap.cuda.state import State
from kv_swap.engine import Completion, CopiesWith, Direction, SwapJob
from kv_swap.errors import CopyError, DeviceError, JobError, PinnedMemoryError
from kv_swap.memory.arena import HostArena

from tests.support.kv_memory import layered_cache
from tests.support.played_cuda import COMPUTE, Stream

LOAD, STORE = Direction.LOAD, Direction.STORE
LAYERS, BLOCKS, SLOTS, PAGE_BYTES = 3, 40, 8, 64
DEVICE = torch.device("cuda", 0)


class Engine:
    """An engine over a KV cache of `LAYERS` layers whose bytes are 1, and slots whose bytes are 7.

    A block or slot is looked at layer by layer: a list of what all bytes of its pages are.
    """

    def __init__(self, *, output: Any = None, copies_with: CopiesWith | None = None) -> None:
        layout, self.storage, self.pages = layered_cache(LAYERS, BLOCKS, PAGE_BYTES)
        arena = HostArena(SLOTS, layout.slot_bytes, register=CudaRegistrar(DEVICE))
        self.slots = arena.view()
        self.pages[:] = 1
        self.slots[:] = 7
        self.copies = CudaSwapEngine(
            layout, arena, DEVICE, [self.storage], output, copies_with=copies_with
        )
        self._job_ids = 0

    def block(self, block: int) -> list[int]:
        return [all_bytes(page[block]) for page in self.pages]

    def slot(self, slot: int) -> list[int]:
        return [all_bytes(page) for page in self.slots[slot].reshape(LAYERS, PAGE_BYTES)]

    def submit(self, direction: Direction, *pairs: tuple[int, int], **how: bool) -> None:
        self._job_ids += 1
        self.copies.submit(SwapJob(self._job_ids, direction, np.array(pairs, np.int32), **how))

    def write(self, block: int, value: int) -> Callable[[], None]:
        """Return work for a stream, which does not keep the engine alive."""
        return partial(self.pages[:, block].fill, value)


def all_bytes(page: np.ndarray) -> int:
    (value,) = set(page.tolist())
    return int(value)


def errors(completions: list[Completion]) -> list[object]:
    return [completion.error for completion in completions]


both_paths = pytest.mark.parametrize("copies_with", ["kernels", "gates"])


# -- copies and compute ------------------------------------------------------------------------


@both_paths
def test_a_store_reads_what_compute_had_been_given_to_write(cuda, copies_with):
    engine = Engine(copies_with=copies_with)
    cuda.queue(engine.write(3, 9))
    engine.submit(STORE, (3, 5))
    cuda.run_copies()
    assert engine.copies.poll() == []
    cuda.run()
    assert errors(engine.copies.poll()) == [None]
    assert engine.slot(5) == [9] * LAYERS
    assert engine.slot(4) == [7] * LAYERS


def test_a_store_waits_for_the_output_copy_stream_and_a_load_does_not(cuda):
    output = Stream(cuda)
    engine = Engine(output=output)
    cuda.queue(engine.write(3, 9), output.cuda_stream)
    engine.submit(STORE, (3, 5))
    engine.submit(LOAD, (2, 4))
    cuda.run(*(stream for stream in range(len(cuda.queues)) if stream != output.cuda_stream))
    assert engine.block(2) == [7] * LAYERS
    cuda.run()
    assert engine.slot(5) == [9] * LAYERS


@both_paths
@pytest.mark.parametrize("after_compute", [False, True])
def test_a_load_is_behind_compute_unless_it_need_not_be(cuda, after_compute, copies_with):
    engine = Engine(copies_with=copies_with)
    read: list[list[int]] = []
    cuda.queue(lambda: read.append(engine.block(3)))
    engine.submit(LOAD, (3, 5), after_compute=after_compute)
    cuda.run_copies()
    cuda.run()
    assert read == [[1 if after_compute else 7] * LAYERS]
    assert engine.block(3) == [7] * LAYERS


@pytest.mark.parametrize(
    ("copies_with", "calls"),
    [("kernels", {"launchKernel"}), ("gates", {"cuMemcpyBatchAsync", "cuStreamWriteValue32"})],
)
def test_copies_are_queued_on_the_device_of_the_cache(cuda, copies_with, calls):
    """The thread that submits may use another one meanwhile."""
    engine = Engine(copies_with=copies_with)
    cuda.calls.clear()
    cuda.device = 1
    engine.submit(STORE, (3, 5))
    engine.copies.load_now(np.array([(2, 4)], np.int32))
    assert cuda.device == 1
    calls = {*calls, "memcpyAsync"}
    assert {used for used in cuda.calls if used[0] in calls} == {(call, 0) for call in calls}


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_lists_of_slices_in_flight_are_left_alone(cuda, direction, monkeypatch):
    """A slice is a pair here, and three may be in flight."""
    monkeypatch.setattr(swap, "RING_ENTRIES", 3)
    monkeypatch.setattr(swap, "MAX_PAIRS", 1)
    engine = Engine()
    engine.submit(direction, *((block, 7 - block) for block in range(8)))
    while not engine.copies.poll():
        cuda.run(COMPUTE)
        cuda.step_copies()
    found = [engine.slot(i) if direction is STORE else engine.block(i) for i in range(8)]
    assert found == [[1 if direction is STORE else 7] * LAYERS] * 8


@both_paths
def test_a_load_that_does_not_wait_for_compute_is_timed_from_the_end_of_those_before_it(
    cuda, copies_with, monkeypatch
):
    """Else loads that stand behind others would make the link look slow."""
    monkeypatch.setattr(gated, "SLICE_PIECES", 1)
    monkeypatch.setattr(gated, "PIECE_BYTES", 1)
    monkeypatch.setattr(gated, "MOST_CALLS", 1)
    monkeypatch.setattr(swap, "RING_ENTRIES", 1)
    monkeypatch.setattr(swap, "MAX_PAIRS", 1)
    engine = Engine(copies_with=copies_with)
    for first in (0, 3):
        pairs = ((block, block) for block in range(first, first + 3))
        engine.submit(LOAD, *pairs, after_compute=False)
    ended: list[Completion] = []
    while len(ended) < 2:
        cuda.run()
        ended += engine.copies.poll()
        cuda.now += 1  # until the slices that were queued just now have run
    assert ended[1].seconds == pytest.approx(ended[0].seconds, abs=0.0011)
    assert ended[1].seconds < 0.7 * cuda.now / 1000


# -- fences and zeroing ------------------------------------------------------------------------


@pytest.mark.parametrize("before_compute", [False, True])
@pytest.mark.parametrize("what", ["a fence", "zeroing", "zeroing that was refused half way"])
def test_loads_come_after(cuda, what, before_compute):
    """Else the forward would read zeros, or what a step in flight writes."""
    engine = Engine()
    if what == "a fence":
        cuda.queue(engine.write(3, 9))
        engine.copies.fence_loads()
    elif what == "zeroing":
        engine.copies.zero_blocks([3])
    else:
        cuda.failing = {"zeroing"}
        with pytest.raises(CopyError, match="zeroing 1 blocks of 192 bytes failed: zeroing: "):
            engine.copies.zero_blocks([3])
    engine.submit(LOAD, (3, 5), after_compute=False, before_compute=before_compute)
    cuda.run_copies()
    cuda.run()
    assert engine.block(3) == [7] * LAYERS


def test_a_load_comes_after_zeroing_also_if_the_job_before_it_failed(cuda, monkeypatch):
    """And one that had begun before the zeroing is still running."""
    monkeypatch.setattr(swap, "RING_ENTRIES", 1)
    monkeypatch.setattr(swap, "MAX_PAIRS", 1)
    engine = Engine(copies_with="kernels")
    engine.submit(LOAD, (0, 0), (1, 1), after_compute=False)
    engine.copies.zero_blocks([3])
    cuda.failing = {"eventRecord"}
    engine.submit(LOAD, (4, 4))
    cuda.failing = set()
    engine.submit(LOAD, (3, 5), after_compute=False)
    ended: list[Completion] = []
    while len(ended) < 3:
        cuda.run_copies()
        ended += engine.copies.poll()
        cuda.run(COMPUTE)
    assert engine.block(3) == [7] * LAYERS
    assert [error is None for error in errors(ended)] == [True, False, True]


def test_blocks_are_zeroed_behind_compute_that_was_queued_and_before_what_follows(cuda):
    engine = Engine()
    read: list[list[int]] = []
    cuda.queue(lambda: read.append(engine.block(3)))
    engine.copies.zero_blocks([3])
    cuda.queue(lambda: read.append(engine.block(3)))
    cuda.run_copies()
    cuda.run()
    assert read == [[1] * LAYERS, [0] * LAYERS]
    assert engine.block(2) == engine.block(4) == [1] * LAYERS


@pytest.mark.parametrize("number", range(1, 6))
def test_a_device_without_memory_for_what_copies_need_is_refused(cuda, monkeypatch, number):
    """With the remedy, whichever allocation it is that fails."""
    make, made = cuda.cupy.cuda.Memory, itertools.count(1)

    def allocate(nbytes: int) -> Any:
        if next(made) == number:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        return make(nbytes)

    monkeypatch.setattr(cuda.cupy.cuda, "Memory", allocate)
    with pytest.raises(DeviceError, match="out of memory"):
        Engine(copies_with="gates")


# -- loads at once -----------------------------------------------------------------------------


def test_nothing_more_of_a_job_is_copied_after_its_load_at_once(cuda, monkeypatch):
    monkeypatch.setattr(swap, "RING_ENTRIES", 1)
    monkeypatch.setattr(swap, "MAX_PAIRS", 1)
    engine = Engine()
    engine.submit(LOAD, (3, 5), (4, 6), before_compute=True)
    engine.copies.load_now(np.array([(3, 5), (4, 6)], np.int32))
    engine.write(4, 9)()
    for _ in range(4):
        engine.copies.poll()
        cuda.run()
    assert engine.block(4) == [9] * LAYERS


def test_a_job_that_cannot_be_cut_leaves_the_engine_as_it_was(cuda):
    engine = Engine()
    engine.copies.zero_blocks([3])
    path = engine.copies._state.lanes[LOAD].path
    with mock.patch.object(path, "slices", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.submit(LOAD, (3, 5), after_compute=False)
    assert engine.copies.in_flight == 0
    engine.submit(LOAD, (3, 5), after_compute=False)
    cuda.run_copies()
    cuda.run()
    assert engine.block(3) == [7] * LAYERS


def test_a_load_at_once_is_there_when_it_returns(cuda):
    engine = Engine()
    cuda.queue(engine.write(3, 9))
    engine.copies.load_now(np.array([(3, 5)], np.int32))
    assert engine.block(3) == [7] * LAYERS
    cuda.run()
    assert engine.block(3) == [7] * LAYERS


def test_nothing_of_a_failed_load_is_written_after_the_load_at_once(cuda):
    """The forward goes on then, and may write to the block."""
    engine = Engine()
    engine.submit(LOAD, (3, 5), before_compute=True)
    cuda.failing = {"streamWaitEvent"}
    with pytest.raises(CopyError, match="having compute wait for it failed"):
        engine.copies.await_loads()
    cuda.failing = set()
    engine.copies.load_now(np.array([(3, 5)], np.int32))
    engine.write(3, 9)()
    cuda.run()
    assert engine.block(3) == [9] * LAYERS
    (failed,) = engine.copies.poll()
    assert failed.error is not None


@pytest.mark.parametrize("call", ["eventRecord", "launchKernel"])
def test_a_load_before_compute_that_fails_is_told_before_compute_is_queued(cuda, call):
    engine = Engine()
    cuda.failing = {call}
    engine.submit(LOAD, (3, 5), before_compute=True)
    cuda.failing = set()
    with pytest.raises(CopyError, match=call):
        engine.copies.await_loads()
    cuda.run()
    (failed,) = engine.copies.poll()
    assert call in str(failed.error)


# -- waves -------------------------------------------------------------------------------------


def test_compute_reads_each_wave_when_it_was_awaited(cuda):
    engine = Engine()
    engine.copies.set_waves([[2], [0], [1]])
    read: list[list[int]] = []
    engine.submit(LOAD, (3, 5), (4, 6), before_compute=True, in_waves=True)
    for wave in range(3):
        engine.copies.await_wave(wave)
        cuda.queue(lambda: read.append(engine.block(4)))
    for _ in range(20):  # more than there are operations
        cuda.run(COMPUTE)  # which goes first wherever it may
        cuda.step_copies()
    assert read == [[1, 1, 7], [7, 1, 7], [7, 7, 7]]
    assert errors(engine.copies.poll()) == [None]


def test_the_table_of_waves_is_there_before_the_first_launch(cuda):
    engine = Engine()
    engine.copies.set_waves([[2], [0], [1]])
    how = {"before_compute": True, "in_waves": True, "after_compute": False}
    engine.submit(LOAD, (3, 5), **how)
    cuda.run_copies()
    assert engine.block(3) == [7] * LAYERS


# -- captures, refusals and the end ------------------------------------------------------------


def test_nothing_is_asked_of_a_device_that_captures_a_graph(cuda):
    """A query would end the capture, and a copy would be captured and replayed."""
    engine = Engine()
    engine.submit(STORE, (3, 5))
    cuda.run()
    cuda.capturing = True
    assert engine.copies.poll() == []
    assert not engine.copies.wait(0)
    for how in ({}, {"before_compute": True}):
        with pytest.raises(JobError, match="while a CUDA graph is captured"):
            engine.submit(LOAD, (3, 5), **how)
    with pytest.raises(JobError, match="captures a CUDA graph"):
        engine.copies.load_now(np.array([(3, 5)], np.int32))
    with pytest.raises(JobError, match="outside of a capture"):
        engine.copies.set_waves([[2], [0], [1]])
    assert not cuda.broken_captures
    assert not any(cuda.queues)
    cuda.capturing = False
    assert errors(engine.copies.poll()) == [None]


@pytest.mark.parametrize("closed", [False, True])
def test_memory_is_held_until_copies_and_zeroing_have_ended(cuda, closed):
    """Also if the engine is dropped: it lets its streams run out first."""
    engine = Engine()
    slots, pages = engine.slots, engine.pages
    cuda.queue(engine.write(3, 9))
    engine.submit(STORE, (3, 5))
    engine.copies.zero_blocks([4])
    if closed:
        engine.copies.close(timeout_seconds=0)
        assert engine.copies.keep_alive(()) == (engine.storage,), "copies run"
        engine.copies.keep_alive((engine.storage,))
        with pytest.raises(JobError, match="closed"):
            engine.submit(STORE, (1, 1))
        cuda.run()
        assert errors(engine.copies.poll()) == [None]
        assert engine.copies.keep_alive(()) == ()
    del engine
    gc.collect()
    assert not any(cuda.queues)
    assert set(slots[5].tolist()) == {9}
    assert not pages[:, 4].any()


@pytest.mark.parametrize("forked", [False, True])
def test_memory_is_kept_where_nobody_can_tell_whether_copies_run(cuda, forked, monkeypatch, caplog):
    """A forked child cannot call CUDA."""
    kept: list[State] = []
    monkeypatch.setattr(state, "_LEAKED", kept)
    engine = Engine()
    storage = engine.storage
    engine.submit(STORE, (3, 5))
    cuda.failing = set() if forked else {"streamSynchronize"}
    with monkeypatch.context() as patch:
        if forked:
            patch.setattr(os, "getpid", lambda: -1)
        del engine
        gc.collect()
    held = [(left.keep_alive, bool(left.lanes)) for left in kept]
    told = "what they use is not freed" in caplog.text
    caplog.clear()  # the traceback in a record holds memory, too
    kept.clear()
    assert held == [((storage,), True)]
    assert told is not forked
    assert any(cuda.queues)


@pytest.mark.parametrize(
    ("capability", "shared_bytes", "family"),
    [
        ((7, 5), 64 << 10, VECTOR),
        ((8, 9), 99 << 10, VECTOR),
        ((9, 0), 227 << 10, BULK),
        ((12, 0), 99 << 10, BULK_SMALL),
    ],
)
def test_a_device_has_kernels_that_its_shared_memory_holds(cuda, capability, shared_bytes, family):
    """As RTX 40 and 50 cards have 99 KiB of it for a CTA, and data centre GPUs more."""
    cuda.capability, cuda.shared_bytes = capability, shared_bytes
    assert choose_family(DEVICE) is family
    engine = Engine()
    engine.submit(LOAD, (3, 5))
    cuda.run()
    assert errors(engine.copies.poll()) == [None]
    assert engine.block(3) == [7] * LAYERS


def test_an_arena_that_is_not_page_locked_is_refused(cuda):
    layout = Engine().copies.layout
    pageable = HostArena(2, layout.slot_bytes, register=None)
    with pytest.raises(PinnedMemoryError, match="384 bytes is not page-locked"):
        CudaSwapEngine(layout, pageable, DEVICE, [])
