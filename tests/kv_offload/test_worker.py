"""A rank's half over CPU tensors, with the engine that copies in host memory."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

import torch
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError, JobError
from kv_swap.host.engine import HostSwapEngine
from kv_swap.host.runs import copy_runs

from kv_offload.cache.prefix import CacheGroup
from kv_offload.config import OffloadConfig
from kv_offload.errors import CapacityError, ConfigError, UnsupportedError
from kv_offload.messages import (
    JobResult,
    LoadJob,
    OffloadMetadata,
    OffloadWorkerMetadata,
    StoreJob,
    WorkerCapacity,
)
from kv_offload.worker.worker import OffloadWorker
from tests.support.fakes import PAGE_WORDS, make_kv_cache_config

BLOCKS = 8
BLOCK_BYTES = PAGE_WORDS * 8
NO_BLOCK = 99
"""A block that does not exist: the transfer engine refuses a job that names it."""


def pairs(*values: tuple[int, int]) -> np.ndarray:
    return np.array(values, np.int32).reshape(-1, 2)


def store(job_id: int, *values: tuple[int, int]) -> StoreJob:
    return StoreJob(job_id, pairs(*values))


def load(
    job_id: int, request_id: str, *values: tuple[int, int], incomplete: bool = False
) -> LoadJob:
    return LoadJob(job_id, request_id, pairs(*values), incomplete)


def plan(stores: Sequence[StoreJob] = (), loads: Sequence[LoadJob] = ()) -> OffloadMetadata:
    return OffloadMetadata(tuple(stores), tuple(loads))


class Rank:
    """A worker half and the KV cache of its rank, `BLOCKS` blocks of distinct words."""

    def __init__(self, *, rank: int = 0, num_ranks: int = 1, slots: int = 8, **config: Any) -> None:
        config.setdefault("cpu_bytes", slots * num_ranks * BLOCK_BYTES)
        self.half = OffloadWorker(
            OffloadConfig(**config),
            make_kv_cache_config([CacheGroup(0, 4)], BLOCKS),
            rank,
            num_ranks,
        )
        words = torch.arange(BLOCKS * PAGE_WORDS, dtype=torch.int64)
        self.kv = words.view(BLOCKS, 4, PAGE_WORDS // 4)

    def start(self) -> Rank:
        self.half.register_kv_caches({"layer.0": self.kv})
        return self

    @property
    def engine(self) -> Any:
        return self.half._engine

    def begin(self, metadata: OffloadMetadata) -> None:
        self.half.start_kv_transfers(metadata)

    def end(self, metadata: OffloadMetadata) -> None:
        self.half.prepare_store_kv(metadata)
        self.half.poll()

    def step(self, *stores: StoreJob, loads: Sequence[LoadJob] = ()) -> None:
        """Run a step's hooks; its loads end within it, its stores within the next one."""
        metadata = plan(stores, loads)
        self.begin(metadata)
        assert self.engine.wait(10)
        self.end(metadata)

    def report(self) -> tuple[dict[int, JobResult], set[str], dict[str, LoadJob]]:
        """Return what the ended step reports: stores, loads, and those that failed."""
        received, failed = self.half.take_received()
        report = self.half.take_report()
        if report is None:
            assert not failed
            return {}, received, {}
        assert report.failed_loads == failed.keys()
        return report.stores, received, failed


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank().start()
    yield made
    made.half.shutdown()


class Gate:
    """Stands in front of the copies: holds them, or makes them fail."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.failing = False

    def copy_runs(self, runs: Any) -> None:
        assert self.opened.wait(30)
        if self.failing:
            raise OSError("injected fault")
        copy_runs(runs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr("kv_swap.host.transfers.copy_runs", made.copy_runs)
    yield made
    made.opened.set()


def result(rank: int = 0, *, ok: bool = True) -> JobResult:
    return JobResult(frozenset({rank}), ok)


# -- start -------------------------------------------------------------------------------------


def test_a_rank_holds_its_share_of_host_memory() -> None:
    rank = Rank(num_ranks=2, cpu_bytes=2 * BLOCK_BYTES * 5 + 100).start()
    assert rank.half.num_slots == 5
    assert rank.engine.num_slots == 5
    rank.half.shutdown()


def test_a_share_below_one_slot_is_refused_with_the_size_that_is_needed() -> None:
    rank = Rank(num_ranks=2, cpu_bytes=100)
    with pytest.raises(CapacityError) as caught:
        rank.start()
    message = str(caught.value)
    assert "each of 2 ranks 50 bytes" in message
    assert "one slot takes 64" in message
    assert "set cpu_bytes to 128 or more" in message
    Rank(num_ranks=2, cpu_bytes=128).start().half.shutdown()


def test_a_transfer_engine_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="use 'auto' or 'host'"):
        Rank(transfer_engine="cuda").start()
    Rank(transfer_engine="host").start().half.shutdown()


@pytest.mark.parametrize(("asked", "kind"), [("auto", "cuda"), ("cuda", "cuda"), ("dma", "dma")])
def test_a_cuda_device_has_an_engine_without_kernels_where_asked(asked: str, kind: str) -> None:
    rank = Rank(transfer_engine=asked)
    assert rank.half._engine_kind(torch.device("cuda")) == kind


def test_the_copy_engine_is_of_cuda_devices() -> None:
    with pytest.raises(ConfigError, match=r"is 'dma', .* on cpu: use 'auto' or 'host'"):
        Rank(transfer_engine="dma").start()


def test_another_kind_of_device_is_refused() -> None:
    rank = Rank()
    rank.kv = torch.zeros(BLOCKS, 4, PAGE_WORDS // 4, dtype=torch.int64, device="meta")
    with pytest.raises(UnsupportedError, match="on meta: supported are CUDA devices and CPU"):
        rank.start()


def test_a_cache_that_cannot_be_described_is_refused() -> None:
    rank = Rank()
    with pytest.raises(UnsupportedError, match="layer nobody"):
        rank.half.register_kv_caches({"nobody": rank.kv})


# -- memory that becomes ready -----------------------------------------------------------------


def test_a_rank_reports_its_ready_slots_when_they_have_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = 2
    monkeypatch.setattr(HostSwapEngine, "ready_slots", property(lambda _: ready))
    rank = Rank(rank=1, num_ranks=2, slots=8).start()
    assert rank.half.capacity() == WorkerCapacity(1, num_slots=8, ready_slots=2)
    assert rank.half.take_report() == OffloadWorkerMetadata(ready_slots={1: 2})
    assert rank.half.take_report() is None, "not a slot more"
    rank.step(store(0, (1, 1)))
    rank.step()
    ready = 8
    expected = OffloadWorkerMetadata(stores={0: result(1)}, ready_slots={1: 8})
    assert rank.half.take_report() == expected
    assert rank.half.take_report() is None
    rank.half.shutdown()
    assert rank.half.take_report() is None


def test_host_memory_of_the_cpu_engine_is_ready_at_once(rank: Rank) -> None:
    assert rank.half.capacity() == WorkerCapacity(0, num_slots=8, ready_slots=8)


def test_a_rank_that_has_not_started_has_nothing_ready() -> None:
    assert Rank().half.capacity() == WorkerCapacity(0, 0, 0, synchronous_loads=False)


def test_a_slot_that_is_not_ready_is_refused(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> None:
    monkeypatch.setattr(HostSwapEngine, "ready_slots", property(lambda _: 4))
    rank.step(store(0, (1, 3)), store(1, (1, 4)))
    rank.step()
    assert rank.report()[0] == {0: result(), 1: result(ok=False)}
    with pytest.raises(JobError, match="slot 4, valid are 0 to 3 until more of 8 are page-locked"):
        rank.engine.submit(SwapJob(9, Direction.LOAD, pairs((1, 4))))


# -- stores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("submit", ["start_kv_transfers", "submit_stores"])
def test_stores_start_with_the_next_step(rank: Rank, submit: str) -> None:
    metadata = plan([store(0, (1, 2))])
    rank.begin(metadata)
    rank.end(metadata)
    assert rank.engine.in_flight == 0
    assert rank.report()[0] == {}
    if submit == "submit_stores":
        rank.half.submit_stores()
    else:
        rank.begin(plan())
    assert rank.engine.in_flight == 1


def test_copies_start_before_the_step_is_prepared_and_the_forward_waits_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, rank: Rank
) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    rank.step(store(2, (1, 6)))
    told: list[str] = []
    submit, await_loads = rank.engine.submit, rank.engine.await_loads
    monkeypatch.setattr(
        rank.engine, "submit", lambda job: (told.append(job.direction.value), submit(job))
    )
    monkeypatch.setattr(rank.engine, "await_loads", lambda: (told.append("await"), await_loads()))
    awaited = LoadJob(0, "a", pairs((5, 2)), synchronous=True)
    metadata = plan([], [awaited, load(1, "b", (6, 4))])
    rank.half.start_copies(metadata)
    assert told == ["store", "load", "load"]
    rank.half.submit_stores()
    rank.half.start_kv_transfers(metadata)
    assert told == ["store", "load", "load", "await"], "each started once"
    assert rank.engine.wait(10)
    rank.end(metadata)
    assert torch.equal(rank.kv[5], rank.kv[1])
    assert torch.equal(rank.kv[6], rank.kv[3])
    rank.step()
    assert told == ["store", "load", "load", "await"]


def test_a_store_copies_what_is_there_when_it_is_submitted(rank: Rank) -> None:
    """The forward of the step that planned it runs between planning and submitting."""
    metadata = plan([store(0, (1, 2))])
    rank.begin(metadata)
    rank.kv[1] = 77
    rank.end(metadata)
    rank.step()
    rank.kv[1] = 0
    rank.step(loads=[load(0, "a", (5, 2))])
    assert (rank.kv[5] == 77).all()


def test_both_hooks_that_end_a_step_queue_its_stores_once(rank: Rank) -> None:
    metadata = plan([store(0, (1, 2))])
    rank.begin(metadata)
    for _ in range(3):
        rank.half.prepare_store_kv(metadata)
    rank.half.submit_stores()
    assert rank.engine.in_flight == 1


def test_each_step_queues_its_own_stores(rank: Rank) -> None:
    for job_id in (0, 1):
        rank.half.prepare_store_kv(plan([store(job_id, (job_id, job_id))]))
    rank.half.prepare_store_kv(plan())
    rank.half.submit_stores()
    rank.half.submit_stores()
    assert rank.engine.in_flight == 2


def test_a_store_is_reported_once_when_it_has_ended(rank: Rank) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    assert rank.report() == ({}, set(), {})
    rank.step()
    assert rank.report() == ({0: result(), 1: result()}, set(), {})
    rank.step()
    assert rank.report() == ({}, set(), {})


def test_results_carry_the_rank() -> None:
    rank = Rank(rank=3, num_ranks=4).start()
    rank.step(store(0, (1, 2)))
    rank.step()
    assert rank.report()[0] == {0: result(3)}
    rank.half.shutdown()


def test_the_speed_of_stores_is_reported_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From stores that are large and ran alone; from others where they say that it is higher."""
    rank = Rank(rank=1, num_ranks=2).start()
    monkeypatch.setattr("kv_offload.worker.worker.MEASURED_BYTES", 2 * BLOCK_BYTES)
    job_ids, seconds = itertools.count(), 1.0

    def poll() -> list[Completion]:
        return [dataclasses.replace(done, seconds=seconds) for done in polled()]

    polled = rank.engine.poll
    monkeypatch.setattr(rank.engine, "poll", poll)

    def reported(*sizes: int, beside: bool = False, times: int = 4) -> list[float]:
        """Store `times` jobs of so many blocks each, all at once; return what was reported."""
        speeds = []
        for _ in range(times):
            stores = [store(next(job_ids), *((i, i) for i in range(size))) for size in sizes]
            rank.step(*stores)
            rank.step(loads=[load(99, "a", (1, 2))] if beside else ())
            rank.half.take_received()
            report = rank.half.take_report()
            assert report is not None
            speeds += report.store_bytes_per_second.values()
            assert set(report.store_bytes_per_second) <= {1}
        return speeds

    assert reported(1) == [], "too small to say anything about the link"
    assert reported(2, 2) == [], "two at once"
    assert reported(2, beside=True) == [], "a load beside it"
    assert reported(2) == [2 * BLOCK_BYTES], "once"
    assert reported(1) == []
    seconds = 0.1
    assert reported(1) == [10 * BLOCK_BYTES]
    assert reported(2, 2) == [20 * BLOCK_BYTES]
    assert rank.half.take_report() is None
    rank.half.shutdown()


def test_weights_that_a_rank_was_given_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = 0
    monkeypatch.setattr("kv_offload.worker.worker.count_weight_loads", lambda: lambda: loads)
    rank = Rank(rank=1, num_ranks=2)
    assert rank.half.weight_loads == {}
    rank.start()
    rank.half.take_report()  # of the slots that are ready
    assert rank.half.take_report() is None
    loads = 3
    report = rank.half.take_report()
    assert report is not None
    assert report.weight_loads == rank.half.weight_loads == {1: 3}
    assert rank.half.take_report() is None
    loads = 4
    assert (rank.half.take_report() or report).weight_loads == {1: 4}
    rank.half.shutdown()


def test_a_store_under_way_is_not_reported(rank: Rank, gate: Gate) -> None:
    gate.opened.clear()
    rank.step(store(0, (1, 2)))
    rank.begin(plan())
    rank.end(plan())
    assert rank.report()[0] == {}
    gate.opened.set()
    rank.step()
    assert rank.report()[0] == {0: result()}


def test_a_store_that_fails_is_reported_as_such(rank: Rank, gate: Gate) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    gate.failing = True
    rank.step()
    assert rank.report()[0] == {0: result(ok=False), 1: result(ok=False)}
    assert rank.half.take_stats() is None


def test_a_store_that_is_refused_is_reported_as_such(rank: Rank) -> None:
    rank.step(store(0, (NO_BLOCK, 2)), store(1, (3, 4)))
    rank.step()
    assert rank.report()[0] == {0: result(ok=False), 1: result()}


# -- loads -------------------------------------------------------------------------------------


def test_a_load_brings_back_what_was_stored(rank: Rank) -> None:
    before = rank.kv.clone()
    rank.step(store(0, (1, 2), (3, 0), (6, 7)))
    rank.step()
    rank.kv[:] = -1
    rank.step(loads=[load(0, "a", (4, 0), (5, 7)), load(1, "b", (0, 2))])
    assert rank.report()[1:] == ({"a", "b"}, {})
    for target, source in ((4, 3), (5, 6), (0, 1)):
        assert torch.equal(rank.kv[target], before[source])
    assert (rank.kv[[1, 2, 3, 6, 7]] == -1).all()


def test_a_load_starts_in_its_own_step(rank: Rank, gate: Gate) -> None:
    gate.opened.clear()
    rank.begin(plan(loads=[load(0, "a", (1, 2))]))
    assert rank.engine.in_flight == 1
    rank.end(plan())
    assert rank.report() == ({}, set(), {})
    gate.opened.set()


def test_a_load_is_reported_once(rank: Rank) -> None:
    rank.step(loads=[load(0, "a", (1, 2))])
    assert rank.report()[1] == {"a"}
    assert rank.report()[1] == set()
    rank.step()
    assert rank.report()[1] == set()


def fail_by_copy(rank: Rank, gate: Gate) -> LoadJob:
    gate.failing = True
    return load(0, "a", (1, 2), (4, 3))


def fail_by_slot(rank: Rank, gate: Gate) -> LoadJob:
    return load(0, "a", (1, 2), (4, 1000))


def fail_by_plan(rank: Rank, gate: Gate) -> LoadJob:
    return load(0, "a", (1, 2), (4, 3), incomplete=True)


@pytest.mark.parametrize("fail", [fail_by_copy, fail_by_slot, fail_by_plan])
def test_a_load_that_fails_leaves_zeros_and_is_reported_twice(
    rank: Rank, gate: Gate, fail: Callable[[Rank, Gate], LoadJob]
) -> None:
    """As received, because its blocks are free of copies now, and as failed."""
    before = rank.kv.clone()
    job = fail(rank, gate)
    rank.step(loads=[job])
    assert rank.report() == ({}, {"a"}, {"a": job})
    assert (rank.kv[[1, 4]] == 0).all()
    others = [0, 2, 3, 5, 6, 7]
    assert torch.equal(rank.kv[others], before[others])
    rank.step()
    assert rank.report() == ({}, set(), {})


def test_a_block_that_cannot_be_zeroed_does_not_end_the_engine(
    rank: Rank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    rank.step(loads=[load(0, "a", (NO_BLOCK, 2))])
    assert rank.report()[1:][0] == {"a"}
    assert f"block {NO_BLOCK} does not exist" in caplog.text


def test_a_failed_load_does_not_touch_the_next_one(rank: Rank) -> None:
    before = rank.kv.clone()
    rank.step(store(0, (6, 5)))
    rank.step()
    rank.report()
    rank.step(loads=[load(0, "bad", (1, 1000)), load(1, "good", (2, 5))])
    _, received, failed = rank.report()
    assert (received, set(failed)) == ({"bad", "good"}, {"bad"})
    assert torch.equal(rank.kv[2], before[6])


# -- figures -----------------------------------------------------------------------------------


def test_bytes_and_seconds_are_counted(rank: Rank) -> None:
    rank.step(store(0, (1, 2), (3, 4)))
    rank.step(loads=[load(0, "a", (5, 2))])
    stats = rank.half.take_stats()
    assert stats is not None
    assert stats.data.pop("stored_seconds") > 0
    assert stats.data.pop("loaded_seconds") > 0
    assert stats.data == {"stored_bytes": 2 * BLOCK_BYTES, "loaded_bytes": BLOCK_BYTES}
    assert rank.half.take_stats() is None


# -- draining ----------------------------------------------------------------------------------


def test_a_drain_ends_stores_that_are_queued_or_not_sent(rank: Rank) -> None:
    before = rank.kv.clone()
    rank.step(store(0, (1, 2)))
    assert rank.half.drain([store(1, (3, 4))], [0, 1]).stores == {0: result(), 1: result()}
    assert rank.engine.in_flight == 0
    rank.kv[:] = -1
    rank.step(loads=[load(0, "a", (1, 2), (3, 4))])
    assert torch.equal(rank.kv[[1, 3]], before[[1, 3]])


def test_a_drain_reports_again_what_is_on_its_way(rank: Rank) -> None:
    """The scheduler asks for what it has no report of; it takes both answers."""
    rank.step(store(0, (1, 2)))
    rank.step()
    assert rank.half.drain([], [0]).stores == {0: result()}
    assert rank.report()[0] == {0: result()}
    assert rank.half.drain([], [0]).stores == {0: result()}


def test_a_drain_does_not_answer_for_a_store_that_it_never_saw(rank: Rank) -> None:
    rank.step(store(0, (1, 2)))
    assert rank.half.drain([], [0, 1, 7]).stores == {0: result()}
    assert rank.half.drain([], []).stores == {}


def test_a_drain_remembers_failures(rank: Rank, gate: Gate) -> None:
    rank.step(store(0, (1, 2)), store(1, (NO_BLOCK, 3)))
    rank.step()
    rank.report()
    gate.failing = True
    answers = rank.half.drain([store(2, (3, 4))], [0, 1, 2]).stores
    assert answers == {0: result(), 1: result(ok=False), 2: result(ok=False)}


def test_a_drain_is_bounded(rank: Rank, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    gate.opened.clear()
    rank.step(store(0, (1, 2)))
    started = time.monotonic()
    assert rank.half.drain([store(1, (3, 4))], [0]).stores == {}
    assert time.monotonic() - started < 5
    gate.opened.set()
    rank.step()
    assert rank.report()[0] == {0: result(), 1: result()}


def test_a_drain_keeps_the_loads_that_ended_for_the_next_report(
    rank: Rank, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed ones end like the others: who drains takes their blocks back."""
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    gate.opened.clear()
    rank.begin(plan(loads=[load(0, "a", (1, 2)), load(1, "b", (3, 1000))]))
    assert rank.half.drain([], []).loading == {"a"}
    gate.opened.set()
    assert rank.engine.wait(10)
    assert rank.half.drain([], []).loading == set()
    rank.end(plan())
    received, failed = rank.half.take_received()
    assert (received, failed) == ({"a", "b"}, {})


def test_a_drain_in_which_something_raises_tells_what_has_ended(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.step(store(0, (1, 2)))
    rank.step()

    def fail(timeout_seconds: float) -> bool:
        raise RuntimeError("injected")

    monkeypatch.setattr(rank.engine, "wait", fail)
    answer = rank.half.drain([store(1, (3, 4))], [0, 1])
    assert answer.stores == {0: result()}
    monkeypatch.undo()
    assert rank.half.drain([], [0, 1]).stores == {0: result(), 1: result()}


# -- the end -----------------------------------------------------------------------------------


def test_shutdown_lets_go_of_the_kv_tensors() -> None:
    """A reference that is left keeps GPU memory, or dangles after a sleep."""
    rank = Rank().start()
    rank.step(store(0, (1, 2)))
    rank.step(loads=[load(0, "a", (3, 2))])
    rank.report()
    tensor = weakref.ref(rank.kv)
    del rank.kv
    gc.collect()
    assert tensor() is not None
    rank.half.shutdown()
    gc.collect()
    assert tensor() is None


def test_shutdown_waits_for_what_runs(gate: Gate) -> None:
    rank = Rank().start()
    gate.opened.clear()
    rank.step(store(0, (1, 2)))
    rank.half.submit_stores()
    state = rank.engine._state
    threading.Timer(0.1, gate.opened.set).start()
    rank.half.shutdown()
    assert [done.error for done in state.done] == [None]
    assert state.arena is None


def test_shutdown_may_come_twice_or_before_the_start() -> None:
    rank = Rank()
    rank.half.shutdown()
    rank.start()
    rank.half.shutdown()
    rank.half.shutdown()
    rank.half.poll()
    assert rank.half.drain([], []).stores == {}


def test_a_sleeping_rank_lets_go_of_the_kv_tensors_and_takes_them_again(gate: Gate) -> None:
    rank = Rank().start()
    before = rank.kv.clone()
    rank.step(store(0, (1, 2)))
    gate.opened.clear()
    rank.half.submit_stores()
    threading.Timer(0.1, gate.opened.set).start()
    assert rank.engine._state.keep_alive[0] is rank.kv
    rank.half.unregister_kv_caches()
    assert rank.engine.wait(0), "a copy would run while its memory is unmapped"
    assert rank.engine._state.keep_alive == ()
    rank.half.unregister_kv_caches()
    rank.half.restore_kv_caches()
    rank.half.restore_kv_caches()
    assert rank.engine._state.keep_alive[0] is rank.kv
    rank.kv[:] = -1
    rank.step(loads=[load(0, "a", (5, 2))])
    assert torch.equal(rank.kv[5], before[1])
    rank.half.shutdown()


def test_nothing_is_taken_again_that_is_gone() -> None:
    rank = Rank().start()
    rank.half.unregister_kv_caches()
    tensor = weakref.ref(rank.kv)
    del rank.kv
    gc.collect()
    assert tensor() is None
    rank.half.restore_kv_caches()
    rank.half.shutdown()


def test_a_rank_whose_copies_do_not_end_keeps_the_kv_tensors(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    rank = Rank().start()
    rank.step(store(0, (1, 2)))
    gate.opened.clear()
    rank.half.submit_stores()
    rank.half.unregister_kv_caches()
    assert rank.engine._state.keep_alive[0] is rank.kv
    gate.opened.set()
    rank.half.shutdown()


# -- layers ------------------------------------------------------------------------------------


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, torch.Tensor]]:
    """A rank of two layers, whose calls have been learned, and its other layer's tensor."""
    monkeypatch.setattr("kv_offload.worker.worker.WAVES_FROM_BYTES", 0)
    rank = Rank(slots=16)
    group = rank.half._kv_cache_config.kv_cache_groups[0]
    group.layer_names = ["layer.0", "layer.1"]
    other = rank.kv + 1_000_000
    rank.half.register_kv_caches({"layer.0": rank.kv, "layer.1": other})
    context = object()
    monkeypatch.setattr("kv_offload.worker.worker.forward_context", lambda: context)
    monkeypatch.setattr(
        "kv_offload.worker.worker.forward_with_layer_calls", lambda: (context, "eager")
    )
    rank.begin(plan([store(0, (1, 2))]))
    assert rank.half.on_layer is not None
    for name in group.layer_names:
        rank.half.on_layer(name)
    rank.end(plan([store(0, (1, 2))]))
    rank.step()
    rank.report()
    yield rank, other
    rank.half.shutdown()


def synchronous(job_id: int, request_id: str, *values: tuple[int, int]) -> LoadJob:
    return LoadJob(job_id, request_id, pairs(*values), synchronous=True)


def test_a_layer_has_its_bytes_after_its_call(layers: tuple[Rank, torch.Tensor]) -> None:
    rank, other = layers
    expected = [rank.kv[1].clone(), other[1].clone()]
    rank.kv[:], other[:] = -1, -1
    metadata = plan(loads=[synchronous(0, "a", (4, 2))])
    rank.begin(metadata)
    assert torch.equal(rank.kv[4], expected[0])
    assert (other[4] == -1).all()
    assert rank.half.on_layer is not None
    rank.half.on_layer("layer.0")
    assert (other[4] == -1).all()
    rank.half.on_layer("layer.1")
    assert torch.equal(other[4], expected[1])
    rank.end(metadata)
    assert rank.half.on_layer is None
    report = rank.half.take_report()
    assert report is not None
    assert report.loads == {0: result()}
    assert not report.lost_loads


@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("polled", [False, True])
def test_a_load_of_which_a_layer_did_not_call_is_lost_once(
    layers: tuple[Rank, torch.Tensor], cut_short: bool, polled: bool
) -> None:
    """Also if the copies were found to have ended before the end of the forward."""
    rank, other = layers
    expected = other[1].clone()
    other[:] = -1
    job = synchronous(0, "a", (4, 2))
    rank.begin(plan(loads=[job]))
    assert rank.half.on_layer is not None
    rank.half.on_layer("layer.0")
    if polled:
        assert rank.engine.wait(10)
        rank.half.poll()
    if cut_short:
        rank.begin(plan())
    rank.end(plan())
    assert torch.equal(other[4], expected), "nothing may write the block once the step has ended"
    report = rank.half.take_report()
    assert report is not None
    assert (report.loads, report.lost_loads) == ({0: result()}, {0})
    rank.step(loads=[synchronous(1, "b", (5, 2))])
    report = rank.half.take_report()
    assert report is not None
    assert (report.loads, report.lost_loads) == ({1: result()}, set()), "loaded whole"
    assert rank.half.on_layer is None
    assert not rank.half._loading


def test_small_loads_and_asynchronous_ones_arrive_whole(
    layers: tuple[Rank, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, other = layers
    expected = other[1].clone()
    other[:] = -1
    monkeypatch.setattr("kv_offload.worker.worker.WAVES_FROM_BYTES", 2 * BLOCK_BYTES + 1)
    rank.begin(plan(loads=[synchronous(0, "a", (4, 2)), load(1, "b", (5, 2))]))
    assert torch.equal(other[4], expected)
    assert rank.half.on_layer is None
    rank.end(plan())
    report = rank.half.take_report()
    assert report is not None
    assert not report.lost_loads


def test_without_a_way_to_write_the_table_loads_arrive_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_offload.worker.worker.WAVES_FROM_BYTES", 0)
    context = object()
    monkeypatch.setattr("kv_offload.worker.worker.forward_context", lambda: context)
    monkeypatch.setattr(
        "kv_offload.worker.worker.forward_with_layer_calls", lambda: (context, "eager")
    )

    def fail(engine: HostSwapEngine, waves: object) -> None:
        raise CopyError("no table")

    monkeypatch.setattr(HostSwapEngine, "set_waves", fail)
    rank = Rank(slots=16)
    rank.half._kv_cache_config.kv_cache_groups[0].layer_names = ["layer.0", "layer.1"]
    rank.half.register_kv_caches({"layer.0": rank.kv, "layer.1": rank.kv + 1})
    for loads in ((), (synchronous(0, "a", (4, 2)),)):
        rank.begin(plan(loads=loads))
        if rank.half.on_layer is not None:
            rank.half.on_layer("layer.0")
            rank.half.on_layer("layer.1")
        rank.end(plan())
    assert rank.half.on_layer is None
    report = rank.half.take_report()
    assert report is not None
    assert report.loads == {0: result()}
    rank.half.shutdown()


def test_ended_loads_are_told_once_and_failed_ones_with_the_report(rank: Rank) -> None:
    rank.step(store(0, (1, 2)))
    rank.step()
    rank.begin(plan([], [load(0, "a", (5, 2)), load(1, "b", (6, 2), incomplete=True)]))
    assert rank.engine.wait(10)
    assert rank.half.take_ended_loads() == ({"a"}, set())
    assert rank.half.take_ended_loads() == (set(), set())
    received, failed = rank.half.take_received()
    assert received == failed.keys() == {"b"}
    assert rank.half.take_ended_loads() == (set(), set())


def test_ended_loads_are_told_before_their_report_arrives(rank: Rank) -> None:
    rank.step(store(0, (1, 2)))
    rank.step()
    rank.begin(plan([], [load(0, "a", (5, 2)), load(1, "b", (6, 2), incomplete=True)]))
    assert rank.engine.wait(10)
    rank.end(plan())
    received, failed = rank.half.take_received()
    assert received == {"a", "b"}
    assert failed.keys() == {"b"}
    assert rank.half.take_ended_loads() == (set(), {"a"})
    assert rank.half.take_ended_loads() == (set(), set())


def lost(job_id: int, request_id: str) -> LoadJob:
    """Return a load that nothing can bring."""
    return LoadJob(job_id, request_id, pairs((5, 2)), incomplete=True, synchronous=True)


def test_ended_stores_are_told_once_and_not_beside_an_unreported_loss(rank: Rank) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    rank.begin(plan())
    assert rank.engine.wait(10)
    assert rank.half.take_ended_stores() == {0: result(), 1: result()}
    assert rank.half.take_ended_stores() == {}
    rank.end(plan())
    assert rank.report()[0] == {}
    rank.step(store(2, (1, 5)))
    rank.begin(plan([], [lost(0, "a")]))
    assert rank.engine.wait(10)
    assert rank.half.take_ended_stores() == {}
    rank.half.poll()
    report = rank.half.take_report()
    assert report is not None
    assert (report.stores, report.lost_loads) == ({2: result()}, {0})
    rank.step(store(3, (1, 6)))
    assert rank.report()[0] == {}, "of the step after that"
    rank.begin(plan())
    assert rank.engine.wait(10)
    assert rank.half.take_ended_stores() == {3: result()}


def test_ended_stores_are_told_before_their_report_arrives(rank: Rank) -> None:
    rank.step(store(0, (1, 2)))
    rank.begin(plan())
    assert rank.engine.wait(10)
    rank.end(plan())
    assert rank.report()[0] == {0: result()}
    assert rank.half.take_ended_stores() == {0: result()}
    assert rank.half.take_ended_stores() == {}


def test_a_report_under_way_of_a_lost_load_comes_first(rank: Rank) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    rank.begin(plan([], [lost(0, "a")]))
    assert rank.engine.wait(10)
    rank.end(plan())
    assert rank.report()[0] == {0: result(), 1: result()}
    assert rank.half.take_ended_stores() == {}
    rank.report()
    assert rank.half.take_ended_stores() == {}, "they were told"
