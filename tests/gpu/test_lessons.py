"""The lessons of `docs/design/lessons.md` on a device, with and without each protection."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.cuda.streams import CopyStream
from kv_swap.cuda.swap import SwapKernel
from kv_swap.engine import Direction, SwapJob

from tests.gpu.caches import (
    KIB,
    cupy,
    finish,
    ids,
    make_engine,
    no_wait,
    random_pairs,
    randomize,
    torch,
)
from tests.gpu.gate import Gate
from tests.support.processes import run_module

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # output of vLLM and torch at import
    from kv_offload.cache.prefix import CacheGroup
    from kv_offload.config import OffloadConfig
    from kv_offload.engines.vllm.runner import VLLMRank
    from kv_offload.messages import LoadJob, OffloadMetadata, Outcome, StoreJob
    from kv_offload.worker.worker import OffloadWorker
    from tests.engine.soak import read_device
    from tests.support.configurations import PAGE_WORDS, make_kv_cache_config

pytestmark = pytest.mark.filterwarnings("default")

BLOCKS = 8
BLOCK, SLOT = 3, 5
OLD, NEW = 1, 9
POISON = -1
"""All bits set: NaN in every floating-point cache."""


class Runner:
    """Stands in for a model runner: owns the KV cache and the output-copy stream."""

    def __init__(self) -> None:
        self.output_copy_stream = torch.cuda.Stream()
        self.kv = torch.full((BLOCKS, 4, PAGE_WORDS // 4), OLD, dtype=torch.int64, device="cuda")
        self.half = OffloadWorker(
            OffloadConfig(cpu_bytes=BLOCKS * PAGE_WORDS * 8),
            VLLMRank(
                None,  # type: ignore[arg-type]
                make_kv_cache_config([CacheGroup(0, 4)], BLOCKS),
                gives_idle_blocks=False,
                packs=False,
            ),
            0,
            1,
        )
        self.half.register_kv_caches({"layer.0": self.kv})
        torch.cuda.synchronize()

    @property
    def engine(self) -> Any:
        return self.half.transfer

    def slot(self) -> list[int]:
        """Return the distinct words in `SLOT`."""
        assert self.engine.wait(30)
        torch.cuda.synchronize()
        return np.unique(self.engine._state.arena.view()[SLOT].view(np.int64)).tolist()

    def block(self) -> list[int]:
        assert self.engine.wait(30)
        torch.cuda.synchronize()
        return self.kv[BLOCK].unique().tolist()


PAIRS = np.array([[BLOCK, SLOT]], np.int32)


def plan(*, store: bool = False, load: bool = False) -> OffloadMetadata:
    return OffloadMetadata(
        (StoreJob(0, PAIRS),) if store else (), (LoadJob(0, "a", PAIRS),) if load else ()
    )


# -- stores wait for compute (vLLM 31341) ------------------------------------------------------


def wait_for_the_output_copy_alone(stream: CopyStream, marks: Any) -> None:
    if stream._output_copy_stream is not None:
        WAITS["as it is"](stream, marks[1:])


WAITS: dict[str, Callable[[CopyStream, Any], None]] = {
    "as it is": CopyStream.wait_stream,
    "output copy alone": wait_for_the_output_copy_alone,
    "nothing": no_wait,
}


@pytest.mark.parametrize(
    ("last_writer", "waits_for", "found"),
    [
        ("forward", "as it is", NEW),
        ("forward", "output copy alone", NEW),
        ("forward", "nothing", OLD),
        ("draft head", "as it is", NEW),
        ("draft head", "output copy alone", OLD),
        ("draft head", "nothing", OLD),
        ("stage without sampling", "as it is", NEW),
        ("stage without sampling", "output copy alone", OLD),
        ("stage without sampling", "nothing", OLD),
    ],
)
def test_a_store_reads_the_block_after_a_slow_kernel_has_written_it(
    monkeypatch, last_writer, waits_for, found
):
    """The output-copy stream waits for the sampled tokens, not for what writes KV after them."""
    runner = Runner()
    monkeypatch.setattr(CopyStream, "wait_stream", WAITS[waits_for])
    metadata = plan(store=True)
    gate = Gate()
    with torch.cuda.stream(torch.cuda.Stream()):
        runner.half.submit_stores()
        runner.half.start_kv_transfers(metadata)
        if last_writer == "draft head":
            runner.output_copy_stream.wait_stream(torch.cuda.current_stream())
        gate.hold()
        runner.kv.fill_(NEW)
        if last_writer == "forward":
            runner.output_copy_stream.wait_stream(torch.cuda.current_stream())
        runner.half.prepare_store_kv(metadata)
        assert runner.engine.in_flight == 0
        runner.half.submit_stores()  # the next step begins
        assert runner.engine.in_flight == 1
        gate.open(runner.engine, after_copies=found == OLD)
        assert runner.slot() == [found]
    runner.half.shutdown()


# -- fresh blocks, and blocks whose load failed (vLLM 43990) -----------------------------------


@pytest.mark.parametrize(("load_comes", "found"), [("after zeroing", OLD), ("before", 0)])
def test_zeroing_of_fresh_blocks_does_not_wipe_what_is_loaded(load_comes, found):
    """Runner V1 zeroes between the first hook of a step and the one that submits loads."""
    runner = Runner()
    runner.engine._state.arena.view()[SLOT].view(np.int64)[:] = OLD
    runner.kv.fill_(POISON)
    gate = Gate()
    with torch.cuda.stream(torch.cuda.Stream()):
        runner.half.submit_stores()
        if load_comes == "before":
            runner.half.start_kv_transfers(plan(load=True))
            assert runner.engine.wait(30)
        gate.hold()
        runner.kv[BLOCK] = 0
        if load_comes == "after zeroing":
            runner.half.start_kv_transfers(plan(load=True))
        gate.open(runner.engine, after_copies=load_comes == "before")
        assert runner.block() == [found]
    runner.half.shutdown()


@pytest.mark.parametrize(("zeroes", "found"), [(True, 0), (False, POISON)])
def test_the_destination_of_a_failed_load_holds_no_nan(monkeypatch, zeroes, found):
    def fail(*_: Any) -> None:
        raise cupy.cuda.driver.CUDADriverError(1)  # CUDA_ERROR_INVALID_VALUE

    runner = Runner()
    runner.kv.fill_(POISON)
    torch.cuda.synchronize()
    monkeypatch.setattr(SwapKernel, "launch", fail)
    if not zeroes:
        monkeypatch.setattr(CudaSwapEngine, "zero_blocks", lambda engine, blocks: None)
    runner.half.start_kv_transfers(plan(load=True))
    assert runner.engine.wait(30)
    runner.half.poll()
    assert set(runner.half.ended().ranks[0].jobs.values()) == {Outcome.FAILED}
    assert runner.block() == [found]
    assert runner.kv[BLOCK + 1].unique().tolist() == [POISON]
    runner.half.shutdown()


# -- tables survive a sleep (vLLM 40648) -------------------------------------------------------


def tables(kernel: SwapKernel) -> list[tuple[int, bytes]]:
    return [(table.ptr, read_device(table.ptr, table.size)) for table in kernel.tables]


def test_tables_are_valid_after_sleep_and_wake_up():
    """The plugin is built where vLLM allocates its KV cache, in the pool that a sleep discards."""
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    if not cumem.cumem_available:
        pytest.skip("this vLLM has no allocator for sleep mode")
    allocator = cumem.CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="kv_cache"):
        engine, cache, slots = make_engine(64, [(4 * KIB, 8 * KIB), (48, 64)], 64)
        (kernel,) = engine._state.lanes[Direction.LOAD].path._kernels
        before = tables(kernel)
        # The control: what would happen to a table that torch allocates here.
        content = np.frombuffer(before[0][1], np.uint8).copy()
        in_pool = torch.tensor(content, device=cache.storage.device)
    address = cache.storage.data_ptr()
    torch.cuda.synchronize()

    allocator.sleep(offload_tags=())
    allocator.wake_up()

    assert cache.storage.data_ptr() == address
    assert tables(kernel) == before
    assert in_pool.cpu().numpy().tobytes() != before[0][1]
    randomize(cache.storage)
    pairs = random_pairs(np.random.default_rng(5), 64, 64, 40)
    block_ids, slot_ids = ids(pairs)
    expected = cache.blocks()[block_ids]
    for direction in (Direction.STORE, Direction.LOAD):
        engine.submit(SwapJob(0, direction, pairs))
        assert [done.error for done in finish(engine)] == [None]
        assert torch.equal(slots[slot_ids], expected)
        if direction is Direction.STORE:
            cache.storage.fill_(1)
            engine.zero_blocks(range(64))
    assert torch.equal(cache.blocks()[block_ids], expected)
    engine.close()


@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1", "V2"])
def test_an_engine_with_graphs_sleeps_wakes_up_and_serves(tmp_path, runner):
    """Levels 1 and 2, with host memory that the user keeps through the first."""
    arguments = {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "enable_sleep_mode": True,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.1,
    }
    result = run_module(
        "tests.engine.test_sleep", tmp_path, arguments, VLLM_USE_V2_MODEL_RUNNER=runner
    )
    computed, cached = result.pop("expected")
    hits = {event: tokens for event, (_, tokens) in result.items()}
    print(hits)
    assert hits["sleep 1"] > 0
    assert hits["sleep 1 again"] > 0
    assert (hits["start"], hits["reload"], hits["sleep 2"]) == (0, 0, 0)
    for event, (answers, tokens) in result.items():
        assert answers == (cached if tokens else computed), event


# -- nothing is kept alive (vLLM 39224, 45528) -------------------------------------------------


@pytest.mark.parametrize("end", ["shutdown", "unregister", "dropped"])
def test_no_kv_tensor_is_kept_alive(end):
    gc.collect()
    before = torch.cuda.memory_allocated()
    runner = Runner()
    runner.half.prepare_store_kv(plan(store=True))
    runner.half.submit_stores()
    assert torch.cuda.memory_allocated() > before
    tensor, half = weakref.ref(runner.kv), runner.half
    if end == "shutdown":
        half.shutdown()
    elif end == "unregister":
        half.unregister_kv_caches()
    else:
        del half
    del runner
    gc.collect()
    assert tensor() is None
    assert torch.cuda.memory_allocated() == before
