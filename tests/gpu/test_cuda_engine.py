"""The CUDA path against torch: bytes, ordering, lifetime, failures."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda import gated, state
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.cuda.kernel_families import FAMILIES
from kv_swap.cuda.lane import Lane
from kv_swap.cuda.streams import CopyStream
from kv_swap.cuda.swap import MAX_PAIRS
from kv_swap.engine import Completion, SwapJob
from kv_swap.errors import JobError
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena

from tests.gpu.caches import (
    KIB,
    LOAD,
    MIB,
    ONE_PAIR,
    SHAPES,
    STORE,
    Pages,
    expect_copied,
    finish,
    ids,
    make_cache,
    make_engine,
    no_wait,
    random_pairs,
    randomize,
    run_script,
    same_pairs,
    torch,
)
from tests.gpu.gate import HELD_SECONDS, Gate

BUSY_CYCLES = 200_000_000
"""About 100 ms of a spinning kernel at 2 GHz."""


@pytest.fixture(autouse=True, params=["kernels", "gates"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way that engines copy: a test runs with each, unless it says otherwise."""
    name: str = request.param
    monkeypatch.setattr(state, "choose_copies", lambda layout, device: name)
    return name


def busy() -> None:
    """Occupy the current stream for about 100 ms."""
    torch.cuda._sleep(BUSY_CYCLES)


@pytest.mark.parametrize(("pages", "num_blocks", "count"), SHAPES)
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_moves_exactly_the_bytes_of_the_pairs(pages, num_blocks, count, direction):
    num_slots = count + count // 4 + 1
    engine, cache, slots = make_engine(num_blocks, pages, num_slots)
    randomize(cache.storage, slots)
    pairs = random_pairs(np.random.default_rng(count), num_blocks, num_slots, count)
    expected_storage, expected_slots = expect_copied(cache, slots, pairs, direction)
    engine.submit(SwapJob(4, direction, pairs))
    (completion,) = finish(engine)
    assert completion.error is None
    assert (completion.job_id, completion.direction) == (4, direction)
    assert completion.nbytes == count * cache.layout.slot_bytes
    assert 0 < completion.seconds < 10
    assert torch.equal(slots, expected_slots)
    assert torch.equal(cache.storage.cpu(), expected_storage)
    engine.close()


@pytest.mark.parametrize("awaited", [True, False])
def test_compute_waits_for_a_load_before_it(awaited):
    """Without involving the host. With a control."""
    engine, cache, slots = make_engine(8, [(4 * KIB, 4 * KIB)], 8)
    cache.storage.fill_(1)
    slots.fill_(9)
    seen = cache.tensors[0].clone()
    gate, compute = Gate(), torch.cuda.Stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate.hold()
        engine.submit(SwapJob(1, LOAD, ONE_PAIR, before_compute=True))
    with torch.cuda.stream(compute):
        if awaited:
            engine.await_loads()
        seen.copy_(cache.tensors[0])
    if awaited:
        time.sleep(HELD_SECONDS)
        assert not compute.query()
        gate.release()
    compute.synchronize()
    assert seen[3].unique().tolist() == [9 if awaited else 1]
    gate.release()
    assert len(finish(engine)) == 1
    engine.close()


def test_a_load_at_once_is_behind_compute_that_is_queued():
    engine, cache, slots = make_engine(64, [(64 * KIB, 64 * KIB)], 64)
    slots.fill_(9)
    pairs = np.array([[3, 5], [4, 0]], np.int32)
    torch.cuda._sleep(BUSY_CYCLES)
    cache.storage.fill_(1)
    engine.load_now(pairs)
    assert cache.tensors[0][[3, 4]].unique().tolist() == [9]
    assert cache.tensors[0][[2, 5]].unique().tolist() == [1]
    engine.close()


WAVE_SHAPES: list[tuple[Pages, int, int, list[list[int]]]] = [
    (
        [(16, 32), (4 * KIB + 32, 8 * KIB), (512, 512), (48 * KIB, 48 * KIB)],
        3_000,
        2_500,
        [[2], [3, 0], [1]],
    ),
    (
        [(4 * KIB, 4 * KIB)] * 12,
        3_000,
        MAX_PAIRS + 1,
        [[8, 0, 4], [1, 2, 3], [11, 9], [5, 6, 7, 10]],
    ),
    ([(16 * KIB, 16 * KIB)] * 64, 150, 100, [[*range(i, i + 8)] for i in range(0, 64, 8)]),
    ([(2 * MIB, 2 * MIB)] * 2, 200, 180, [[1], [0]]),
]


@pytest.mark.parametrize(
    ("path", "family"),
    [("kernels", family) for family in FAMILIES],
    indirect=["path"],
)
@pytest.mark.parametrize(("pages", "num_blocks", "count", "waves"), WAVE_SHAPES)
def test_waves_move_exactly_the_bytes_of_the_pairs(
    pages, num_blocks, count, waves, family, monkeypatch
):
    monkeypatch.setattr(state, "choose_family", lambda device: family)
    engine, cache, slots = make_engine(num_blocks, pages, count)
    engine.set_waves(waves)
    randomize(cache.storage, slots)
    pairs = random_pairs(np.random.default_rng(count), num_blocks, count, count)
    block_ids, slot_ids = ids(pairs)
    expected, _ = expect_copied(cache, slots, pairs, LOAD)
    engine.submit(SwapJob(4, LOAD, pairs, before_compute=True, in_waves=True))
    engine.await_wave(len(waves) - 1)
    # Compute sees it without involving the host.
    assert torch.equal(cache.storage.cpu(), expected)
    (completion,) = finish(engine)
    assert (completion.error, completion.nbytes) == (None, count * cache.layout.slot_bytes)
    assert 0 < completion.seconds < 10
    # Whole loads and stores still use the other table.
    slots.zero_()
    engine.submit(SwapJob(5, STORE, pairs))
    finish(engine)
    assert torch.equal(slots[slot_ids], cache.blocks()[block_ids])
    engine.close()


@pytest.mark.parametrize("waits", [True, False])
def test_compute_runs_while_later_waves_arrive(waits):
    """Every layer finds its bytes, the first long before the last has arrived. With a control."""
    layers, num_blocks = 8, 256
    engine, cache, slots = make_engine(num_blocks, [(256 * KIB, 256 * KIB)] * layers, num_blocks)
    engine.set_waves([[layer] for layer in range(layers)])
    cache.storage.fill_(1)
    slots.fill_(9)
    pairs = same_pairs(num_blocks)
    seen = [torch.empty_like(tensor) for tensor in cache.tensors]
    began = torch.cuda.Event(enable_timing=True)
    read = [torch.cuda.Event(enable_timing=True) for _ in range(layers)]
    for _ in range(2):  # in the first round CUDA loads what it loads at first use
        cache.storage.fill_(1)
        torch.cuda.synchronize()
        began.record()
        engine.submit(SwapJob(1, LOAD, pairs, before_compute=True, in_waves=True))
        for layer in range(layers):
            if waits or not layer:
                engine.await_wave(layer)
            seen[layer].copy_(cache.tensors[layer])
            read[layer].record()
        engine.await_wave(layers - 1)
        torch.cuda.synchronize()
        (completion,) = finish(engine)
        assert completion.error is None
    assert seen[0].unique().tolist() == [9]
    last = seen[layers - 1].unique().tolist()
    assert last == [9] if waits else 1 in last
    # 64 MiB per layer, about 1.3 ms on PCIe Gen5 x16; the first four are joined.
    first_ms, last_ms = (began.elapsed_time(event) for event in (read[0], read[-1]))
    assert first_ms < completion.seconds * 1000 * 0.8
    if waits:
        assert last_ms > completion.seconds * 1000 * 0.9
        assert all(torch.all(part == 9) for part in seen)
    engine.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_load_waits_for_compute(ordered, monkeypatch):
    """Fresh blocks are zeroed on the compute stream; a load must follow. With a control."""
    engine, cache, slots = make_engine(8, [(4 * KIB, 4 * KIB)], 8)
    if not ordered:
        monkeypatch.setattr(CopyStream, "wait_stream", no_wait)
    slots.fill_(7)
    cache.storage.zero_()  # CUDA loads a kernel at its first use, which waits for running ones
    gate = Gate()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate.hold()
        cache.storage.zero_()
        engine.submit(SwapJob(1, LOAD, ONE_PAIR))
        gate.open(engine, after_copies=not ordered)
    finish(engine)
    torch.cuda.synchronize()
    assert cache.tensors[0][3].unique().tolist() == [7 if ordered else 0]
    assert not cache.tensors[0][4].any()
    engine.close()


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("before_compute", [False, True])
def test_loads_come_after_the_zeroing_of_their_blocks(before_compute, fenced, monkeypatch):
    """With a control in which the block is zeroed after it was loaded."""
    engine, cache, slots = make_engine(8, [(4 * KIB, 4 * KIB)], 8)
    job = SwapJob(1, LOAD, ONE_PAIR, before_compute=before_compute, after_compute=False)
    slots.fill_(7)
    cache.storage.zero_()
    engine.zero_blocks([3])  # torch makes its pools now
    torch.cuda.synchronize()
    if not fenced:
        monkeypatch.setattr(Lane, "wait_for_compute", lambda lane: None)
    gate = Gate()
    with torch.cuda.stream(torch.cuda.Stream()):
        engine.zero_blocks([3])
        torch.cuda.synchronize()
        gate.hold()
        engine.zero_blocks([3])
        engine.submit(job)
        gate.open(engine, after_copies=not fenced)
    finish(engine)
    torch.cuda.synchronize()
    assert cache.tensors[0][3].unique().tolist() == [7 if fenced else 0]
    engine.close()


def test_submitting_does_not_block_while_the_device_is_busy(path):
    pages, count = [(16 * KIB, 16 * KIB)] * 8, 1_200
    if path == "gates":
        pages, count = [(2 * MIB, 2 * MIB)], 300
    engine, cache, slots = make_engine(count, pages, count)
    randomize(cache.storage, slots)
    pairs = random_pairs(np.random.default_rng(0), count, count, count - 50)
    engine.submit(SwapJob(0, STORE, pairs))
    finish(engine)
    busy()
    compute = torch.cuda.Event()
    compute.record()
    started = time.perf_counter()
    engine.submit(SwapJob(1, STORE, pairs))
    submit_seconds = time.perf_counter() - started
    started = time.perf_counter()
    assert engine.poll() == []
    poll_seconds = time.perf_counter() - started
    assert not compute.query()
    assert submit_seconds < 2e-3
    assert poll_seconds < 1e-3
    finish(engine)
    engine.close()


def test_submitting_within_a_capture_is_refused():
    engine, _, _ = make_engine(8, [(4 * KIB, 4 * KIB)], 8)
    value = torch.zeros(16, device="cuda").add_(1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        value.add_(1)
        with pytest.raises(JobError, match="while a CUDA graph is captured"):
            engine.submit(SwapJob(1, STORE, ONE_PAIR))
        assert engine.poll() == []
    assert engine.in_flight == 0
    engine.close()


class Token:
    """Stands for a KV tensor in `keep_alive`."""


class WatchingRegistrar(CudaRegistrar):
    """Records at each unregistration whether `event` had completed."""

    event: Any = None

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.ended_before: list[bool] = []

    def unregister(self, address: int) -> None:
        self.ended_before.append(self.event.query())
        super().unregister(address)


@pytest.mark.parametrize("view_survives", [True, False])
def test_dropping_everything_in_mid_copy(view_survives, path):
    cache = make_cache(400, [(MIB, MIB)])
    registrar = WatchingRegistrar(cache.storage.device)
    arena = HostArena(400, cache.layout.slot_bytes, register=registrar)
    owner = weakref.ref(arena._owner)
    token = Token()
    kept = weakref.ref(token)
    randomize(cache.storage)
    expected = cache.storage.cpu().view(400, -1)
    surviving = torch.from_numpy(arena.view()) if view_survives else None
    engine = CudaSwapEngine(cache.layout, arena, cache.storage.device, [cache.storage, token])
    busy()
    engine.submit(SwapJob(1, STORE, same_pairs(400)))
    registrar.event = torch.cuda.Event()
    registrar.event.record(engine._state.lanes[STORE].stream.stream)
    assert not registrar.event.query()
    del engine, arena, token
    gc.collect()
    assert registrar.event.query()
    assert kept() is None
    if surviving is not None:
        # What was queued when the engine went has been copied: everything, or at least one slice.
        slice_bytes = gated.SLICE_PIECES * gated.PIECE_BYTES
        queued = 400 if path == "kernels" else slice_bytes // MIB
        assert torch.equal(surviving[:queued], expected[:queued])
        assert owner() is not None
        del surviving
        gc.collect()
    assert owner() is None
    assert registrar.ended_before == [True] * 25  # 400 MiB in pieces of 16


def test_slots_may_cross_from_one_registration_to_the_next(monkeypatch):
    monkeypatch.setattr(registration, "PIECE_BYTES", 36 * KIB)
    monkeypatch.setattr(registration, "LARGEST_PIECE_BYTES", 36 * KIB)
    engine, cache, slots = make_engine(32, [(40 * KIB, 40 * KIB)], 32)
    randomize(cache.storage)
    pairs = random_pairs(np.random.default_rng(0), 32, 32, 32)
    block_ids, slot_ids = ids(pairs)
    expected = cache.blocks()
    engine.submit(SwapJob(1, STORE, pairs))
    (completion,) = finish(engine)
    assert completion.error is None
    assert torch.equal(slots[slot_ids], expected[block_ids])
    cache.storage.zero_()
    engine.submit(SwapJob(2, LOAD, pairs))
    finish(engine)
    assert torch.equal(cache.blocks(), expected)
    engine.close()


def test_load_overtakes_a_long_store():
    engine, cache, slots = make_engine(800, [(MIB, MIB)], 800)
    randomize(cache.storage, slots)
    pairs = random_pairs(np.random.default_rng(0), 800, 800, 800)
    engine.submit(SwapJob(1, STORE, pairs[:799]))
    engine.submit(SwapJob(2, LOAD, pairs[799:]))
    completions: list[Completion] = []
    while len(completions) < 2:
        completions += engine.poll()
    assert [completion.job_id for completion in completions] == [2, 1]
    assert completions[0].seconds < completions[1].seconds / 4
    engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one():
    engine, cache, slots = make_engine(8, [(4 * KIB, 4 * KIB)], 8, device="cuda:1")
    cache.storage.fill_(3)
    torch.cuda.synchronize("cuda:1")
    engine.submit(SwapJob(1, STORE, ONE_PAIR))
    (completion,) = finish(engine)
    assert completion.error is None
    assert (slots[5] == 3).all()
    assert torch.cuda.current_device() == 0
    engine.close()


SCRIPT = """
import numpy as np, torch
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.engine import Direction, SwapJob
from kv_swap.layout import KVLayout, TensorDescription
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.memory.arena import HostArena
device = torch.device("cuda", 0)
storage = torch.ones(400, 1 << 20, dtype=torch.uint8, device=device)
address = ADDRESS
tensor = TensorDescription("kv", address, (400, 1 << 20), (1 << 20, 1), 1, 0, 1 << 20)
layout = KVLayout.from_tensors(400, [tensor])
arena = HostArena(400, layout.slot_bytes, register=CudaRegistrar(device))
engine = CudaSwapEngine(layout, arena, device, [storage], copies_with="PATH")
pairs = np.stack([np.arange(400)] * 2, 1).astype(np.int32)
torch.cuda._sleep(100_000_000)
HARM
engine.submit(SwapJob(1, Direction.STORE, pairs))
"""

ILLEGAL_WRITE = """
import cupy
source = 'extern "C" __global__ void harm(unsigned long long a) { *(int*)a = 1; }'
cupy.RawKernel(source, "harm")((1,), (1,), (np.uint64(1 << 46),))
"""
"""On the default stream, which is torch's too: copies that wait for it find the context lost."""


def test_the_process_may_end_in_mid_copy(path):
    ended = run_script(SCRIPT, ADDRESS="storage.data_ptr()", PATH=path, HARM="")
    assert ended.returncode == 0, ended.stderr
    assert "Error" not in ended.stderr


def test_a_lost_context_fails_jobs_and_hangs_nothing(path):
    """In a separate process: after an illegal access no CUDA call succeeds any more.

    A kernel makes that access; the driver would refuse such an address to a copy engine.
    """
    kernel = path == "kernels"
    ended = run_script(
        SCRIPT
        + """
assert engine.wait(60)
(first,) = engine.poll()
print(first.error)
engine.submit(SwapJob(2, Direction.STORE, pairs))
(second,) = engine.poll()
print(second.error)
assert engine.in_flight == 0
engine.close()
print("closed")
""",
        ADDRESS="1 << 46" if kernel else "storage.data_ptr()",
        PATH=path,
        HARM="" if kernel else ILLEGAL_WRITE,
    )
    lines = ended.stdout.splitlines()
    assert lines, ended.stderr
    assert "illegal memory access" in ended.stdout
    assert "store job 1 of 419430400 bytes; the CUDA context is lost" in ended.stdout
    assert "store job 2 of 419430400 bytes" in ended.stdout
    assert lines[-1] == "closed", ended.stderr
