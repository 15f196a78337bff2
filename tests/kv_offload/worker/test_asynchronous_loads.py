from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed")

import torch

from kv_offload.messages import LoadJob
from tests.support.rank import NO_BLOCK, Gate, Rank, load, store


def test_a_load_brings_back_what_was_stored(rank: Rank) -> None:
    before = rank.kv.clone()
    rank.store(store(0, (1, 2), (3, 0), (6, 7)))
    rank.kv[:] = -1
    rank.step(loads=[load(0, "a", (4, 0), (5, 7)), load(1, "b", (0, 2))])
    assert rank.half.reports.take_received() == ({"a", "b"}, {})
    assert torch.equal(rank.kv[[4, 5, 0]], before[[3, 6, 1]])
    assert (rank.kv[[1, 2, 3, 6, 7]] == -1).all()


def test_a_load_starts_in_its_own_step_and_is_told_once_when_it_has_ended(
    rank: Rank, gate: Gate
) -> None:
    gate.opened.clear()
    metadata = rank.begin(loads=[load(0, "a", (1, 2))])
    assert rank.transfer.in_flight == 1
    rank.end(metadata)
    assert rank.half.reports.take_received() == (set(), {})
    gate.opened.set()
    rank.step()
    assert rank.half.reports.take_received() == ({"a"}, {})
    rank.step()
    assert rank.half.reports.take_received() == (set(), {})


def fail_by_copy(gate: Gate) -> LoadJob:
    gate.failing = True
    return load(0, "a", (1, 2), (4, 3))


def fail_by_slot(gate: Gate) -> LoadJob:
    return load(0, "a", (1, 2), (4, 1000))


def fail_by_plan(gate: Gate) -> LoadJob:
    return load(0, "a", (1, 2), (4, 3), incomplete=True)


@pytest.mark.parametrize("fail", [fail_by_copy, fail_by_slot, fail_by_plan])
def test_a_load_that_fails_leaves_zeros_and_is_told_twice(
    rank: Rank, gate: Gate, fail: Callable[[Gate], LoadJob]
) -> None:
    """As received, because its blocks are free of copies now, and as failed."""
    before = rank.kv.clone()
    job = fail(gate)
    rank.step(loads=[job])
    assert rank.half.reports.take_received() == ({"a"}, {"a": job})
    assert rank.report().failed_loads == {"a"}
    assert (rank.kv[[1, 4]] == 0).all()
    others = [0, 2, 3, 5, 6, 7]
    assert torch.equal(rank.kv[others], before[others])
    rank.step()
    assert rank.half.reports.take_received() == (set(), {})
    assert rank.half.take_report() is None


def test_a_block_that_cannot_be_zeroed_does_not_end_the_engine(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.step(loads=[load(0, "a", (NO_BLOCK, 2))])
    assert rank.half.reports.take_received()[0] == {"a"}
    assert f"rank 0: block {NO_BLOCK} does not exist" in caplog.text


def test_a_failed_load_does_not_touch_the_next_one(rank: Rank) -> None:
    before = rank.kv.clone()
    rank.store(store(0, (6, 5)))
    rank.step(loads=[load(0, "bad", (1, 1000)), load(1, "good", (2, 5))])
    received, failed = rank.half.reports.take_received()
    assert (received, failed.keys()) == ({"bad", "good"}, {"bad"})
    assert torch.equal(rank.kv[2], before[6])


def test_a_drain_keeps_the_loads_that_ended_for_the_next_report(
    rank: Rank, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed ones end like the others: who drains takes their blocks back."""
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    gate.opened.clear()
    metadata = rank.begin(loads=[load(0, "a", (1, 2)), load(1, "b", (3, 1000))])
    assert rank.half.drain([], []).loading == {"a"}
    gate.opened.set()
    assert rank.transfer.wait(10)
    assert rank.half.drain([], []).loading == set()
    rank.end(metadata)
    assert rank.half.reports.take_received() == ({"a", "b"}, {})
