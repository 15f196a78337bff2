"""Ranks that keep their bytes once. Here each is a thread; tests/engine has real processes."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from kv_swap.errors import DeviceError, PinnedMemoryError
from kv_swap.host.transfers import copy_runs
from kv_swap.layout import Packing
from kv_swap.memory.shared import SharedMemory

from kv_offload.errors import UnsupportedError
from kv_offload.messages import Outcome, StoreJob, WorkerCapacity
from kv_offload.worker.sharing import SharingRanks, arena_bytes
from tests.support.rank import BLOCK_BYTES, BLOCKS, PAGE_WORDS, Rank, load, refuse_blocks, store

OK, FAILED = Outcome.OK, Outcome.FAILED

OTHER = 1000
"""What rank 1's words are above those of rank 0, to see who copied. Real ranks' are equal."""


class Meeting:
    """Where `count` threads tell each other something."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=120)
        self._told: dict[int, Any] = {}
        self.count = count

    def ranks(self, index: int) -> SharingRanks:
        def gather(value: Any) -> list[Any]:
            self._told[index] = value
            self._barrier.wait()
            values = [self._told[rank] for rank in range(self.count)]
            self._barrier.wait()
            return values

        return SharingRanks(index, self.count, gather)


class Ranks:
    """The two ranks of one engine: each has four slots of a layer, or they share eight."""

    def __init__(self, *layers: dict[str, torch.Tensor], **config: Any) -> None:
        meeting = Meeting(2)
        self.both = [
            Rank(rank=rank, num_ranks=2, sharing=meeting.ranks(rank), slots=4, **config)
            for rank in range(2)
        ]
        self.both[1].kv.add_(OTHER)
        for rank, own in zip(self.both, layers, strict=bool(layers)):
            rank.layers = own

    def start(self) -> Ranks:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Rank.start, self.both))
        return self

    def stop(self) -> None:
        for rank in self.both:
            rank.half.shutdown()

    def arena(self, rank: int) -> np.ndarray:
        return self.both[rank].transfer._state.arena.view().view(np.int64)[:, 0]

    def store(self, job_id: int, *pairs: tuple[int, int]) -> list[dict[int, Outcome]]:
        return [rank.store(store(job_id, *pairs)) for rank in self.both]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks().start()
    yield made
    made.stop()


def test_cpu_bytes_are_for_all_ranks_once():
    assert arena_bytes(1000, num_ranks=4, sharing_ranks=1) == 250
    assert arena_bytes(1000, num_ranks=4, sharing_ranks=2) == 500, "two stages of two ranks"
    assert arena_bytes(1000, num_ranks=4, sharing_ranks=4) == 1000


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("num_pairs", [1, 2, 7, 64])
def test_every_pair_is_one_ranks_and_parts_are_even(count, num_pairs):
    pairs = np.arange(2 * num_pairs, dtype=np.int32).reshape(-1, 2)
    meeting = Meeting(count)
    copied = np.zeros(count, int)
    for job_id in range(count):
        job = StoreJob(job_id, pairs)
        parts = [pairs[meeting.ranks(rank).own_part(job)] for rank in range(count)]
        assert sorted(np.concatenate(parts).tolist()) == pairs.tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        copied += [len(part) for part in parts]
    assert set(copied) == {num_pairs}, "ranks take turns"


def test_the_ranks_hold_all_of_cpu_bytes_once(ranks):
    for index, rank in enumerate(ranks.both):
        assert rank.half.capacity() == WorkerCapacity(index, 8, 8, slot_bytes=BLOCK_BYTES)
    ranks.arena(0)[3] = 77
    assert ranks.arena(1)[3] == 77


def test_each_rank_stores_its_part_and_loads_everything(ranks):
    assert ranks.store(0, (1, 4), (2, 5), (3, 6), (4, 7)) == [{0: OK}, {0: OK}]
    firsts = [PAGE_WORDS * block for block in (1, 2, 3, 4)]
    expected = [*firsts[:2], *(first + OTHER for first in firsts[2:])]
    assert ranks.arena(0)[4:].tolist() == expected
    for rank in ranks.both:
        rank.kv.zero_()
        rank.step(loads=[load(1, "request", (5, 4), (6, 6), (7, 7))])
        assert rank.jobs() == {1: OK}
        assert rank.kv[5:, 0, 0].tolist() == [expected[0], expected[2], expected[3]]


def two_layers(reverse: bool) -> dict[str, torch.Tensor]:
    """Return two layers of one allocation, the first at its start or at its end."""
    words = torch.ones(2, BLOCKS, 4, PAGE_WORDS // 4, dtype=torch.int64)
    words[0 if reverse else 1] = 2
    return {f"layer.{i}": words[1 - i if reverse else i] for i in range(2)}


def test_layers_lie_elsewhere_on_another_rank():
    """Allocators promise no order: one rank's last layer may have the lowest address."""
    ranks = Ranks(two_layers(reverse=False), two_layers(reverse=True)).start()
    assert {rank.half.sharing_ranks for rank in ranks.both} == {2}
    ranks.store(0, (1, 0), (2, 1))
    for rank in ranks.both:
        for layer in rank.layers.values():
            layer.zero_()
        rank.step(loads=[load(1, "request", (5, 0), (6, 1))])
        assert [set(layer[5:7].unique().tolist()) for layer in rank.layers.values()] == [{1}, {2}]
    ranks.stop()


def test_ranks_with_other_layers_share_nothing():
    mine, others = two_layers(reverse=False), two_layers(reverse=False)
    ranks = Ranks(mine, dict(reversed(others.items()))).start()
    assert {rank.half.sharing_ranks for rank in ranks.both} == {1}
    ranks.stop()


@pytest.mark.parametrize(("periods", "sharing"), [((8, 8), 2), ((8, 16), 1)])
def test_ranks_share_packed_slots_if_they_pack_alike(periods, sharing):
    numbers = torch.randn((4, 512, 64), generator=torch.Generator().manual_seed(5))
    made = [{"layer.0": numbers.to(torch.bfloat16)} for _ in periods]
    ranks = Ranks(*made, cpu_bytes=8 << 16)
    for rank, period in zip(ranks.both, periods, strict=True):
        rank.engine.packings = {"layer.0": Packing(period)}
    ranks.start()
    assert {rank.half.sharing_ranks for rank in ranks.both} == {sharing}
    if sharing > 1:
        ranks.store(0, (1, 0), (2, 1))
        for rank in ranks.both:
            rank.layers["layer.0"].zero_()
            rank.step(loads=[load(1, "request", (3, 0), (0, 1))])
            assert torch.equal(rank.layers["layer.0"][[3, 0]], numbers[1:3].to(torch.bfloat16))
    ranks.stop()


def test_a_rank_without_a_part_reports_too_and_ranks_take_turns(ranks):
    for job_id in range(4):
        assert ranks.store(job_id, (1, job_id)) == [{job_id: OK}, {job_id: OK}]
    copied_by = [1 if first >= OTHER else 0 for first in ranks.arena(0)[:4].tolist()]
    assert sorted(copied_by) == [0, 0, 1, 1]


def test_a_part_that_fails_fails_the_job(ranks, monkeypatch):
    arena = ranks.both[1].transfer._state.arena

    def fail_on_rank_1(runs: Any) -> None:
        if arena.address <= runs[0][0] < arena.address + arena.nbytes:
            raise OSError("injected fault")
        copy_runs(runs)

    monkeypatch.setattr("kv_swap.host.transfers.copy_runs", fail_on_rank_1)
    assert ranks.store(0, (1, 4), (2, 5)) == [{0: OK}, {0: FAILED}]


def test_a_rank_names_the_rows_of_its_part_that_do_not_fit(ranks, monkeypatch):
    for rank in ranks.both:
        refuse_blocks(monkeypatch, rank, 2, 4)
    for job_id in (0, 1):  # ranks take turns
        rows = []
        for rank in ranks.both:
            rank.step(store(job_id, (1, 4), (2, 5), (3, 6), (4, 7)))
            rank.step()
            rows.append(rank.report().failed_rows[job_id])
        assert rows == [[(1,), (3,)], [(3,), (1,)]][job_id]


def test_a_device_that_cannot_be_served_is_refused_in_the_plugins_words(monkeypatch):
    """The device is asked for its NUMA node before an engine is made for it."""
    error = DeviceError("CuPy cannot be imported")
    monkeypatch.setattr("kv_offload.worker.allocation.numa_node", mock.Mock(side_effect=error))
    with pytest.raises(UnsupportedError) as caught:
        Ranks().start()
    assert str(caught.value) == "kv-offload: CuPy cannot be imported"


def open_files() -> set[str]:
    """Return what this process has open. Other tests' files may be closed at any time."""
    gc.collect()
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add(f"{descriptor.name}: {descriptor.readlink()}")
    return found


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("create", PinnedMemoryError("cannot share 8 bytes"), "rank 0: cannot share 8 bytes"),
        ("attach", OSError("no file descriptors left"), "rank 1: no file descriptors left"),
    ],
)
def test_where_one_rank_cannot_share_none_does(monkeypatch, caplog, method, error, reason):
    monkeypatch.setattr(SharedMemory, method, mock.Mock(side_effect=error))
    open_before = open_files()
    ranks = Ranks().start()
    assert open_files() <= open_before
    (warning,) = {r.getMessage() for r in caplog.records if "cannot share" in r.getMessage()}
    assert "each keeps its own copy" in warning
    assert reason in warning
    assert [rank.half.num_slots for rank in ranks.both] == [4, 4], "of cpu_bytes for 8"
    assert ranks.store(0, (1, 3), (2, 2)) == [{0: OK}, {0: OK}]
    for rank in range(2):
        expected = [2 * PAGE_WORDS + OTHER * rank, PAGE_WORDS + OTHER * rank]
        assert ranks.arena(rank)[2:].tolist() == expected
    ranks.stop()


def test_nothing_stays_open(ranks):
    ranks.stop()
    before = open_files()
    for _ in range(3):
        Ranks().start().stop()
    assert open_files() <= before
