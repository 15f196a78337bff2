"""What a rank reports: how jobs ended, until that is known; and what it counts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from kv_offload.messages import OffloadWorkerMetadata, Outcome, RankReport
from tests.support.rank import BLOCK_BYTES, PlainRank, Rank, load, store, synchronous


def test_a_job_is_told_until_it_is_known(rank):
    """A report may be lost, or its step may be one of those that an error cuts short."""
    rank.step(store(0, (1, 2)))
    for _ in range(2):
        rank.step(known=())
        assert rank.half.ended() == OffloadWorkerMetadata({0: RankReport({0: Outcome.OK})})
        assert rank.half.report() == rank.half.ended()
    assert rank.drain(known=()) == {0: Outcome.OK}
    rank.step(store(1, (3, 4)), known=[0])
    assert rank.half.report() is None
    rank.step(known=[0])
    assert rank.jobs() == {1: Outcome.OK}
    assert rank.drain(known=[1]) == {}


@pytest.mark.parametrize("by", ["step", "drain"])
def test_a_job_that_never_came_has_failed(rank, gate, by):
    """An error of the engine may keep a step's plan from its ranks. What runs has not failed."""
    gate.opened.clear()
    rank.end(rank.begin(store(0, (1, 2)), loads=[load(1, "a", (5, 3))]))
    rank.next_job_id = 4
    if by == "step":
        rank.end(rank.begin(store(5, (3, 4))))
        assert rank.jobs() == dict.fromkeys((2, 3, 4), Outcome.FAILED)
    gate.opened.set()
    expected = dict.fromkeys((2, 3, 4), Outcome.FAILED) | dict.fromkeys((0, 1, 5), Outcome.OK)
    assert rank.drain(*[store(5, (3, 4))] * (by == "drain"), known=()) == expected


def test_ready_slots_and_weight_loads_are_reported_when_they_have_grown():
    rank = Rank(rank=1, num_ranks=2)
    assert rank.half.weight_loads() == {}
    rank.start()
    assert rank.report() == RankReport(ready_slots=8)
    assert rank.half.report() is None
    rank.engine.weight_loads = 3
    assert rank.half.weight_loads() == {1: 3}
    assert rank.report() == RankReport(weight_loads=3)
    assert rank.half.report() is None
    rank.half.shutdown()
    assert rank.half.report() is None, "fewer slots are no news"


def test_what_cannot_wait_is_told_where_a_report_raises(rank, monkeypatch):
    """The engine takes in the tokens of this step, whatever they were computed with."""

    def fail(_: PlainRank) -> int:
        raise RuntimeError("injected")

    rank.begin(admissions=7)
    rank.step(loads=[synchronous(0, "a", (5, 2), incomplete=True)])
    with monkeypatch.context() as patch:
        patch.setattr(PlainRank, "weight_loads", property(fail), raising=False)
        with pytest.raises(RuntimeError, match="injected"):
            rank.half.report()
    losses = rank.half.take_losses()
    assert losses == OffloadWorkerMetadata({0: RankReport({0: Outcome.LOST}, aborted_step=7)})
    assert rank.report() == RankReport({0: Outcome.LOST}), "a step is told once to be cut short"


def test_an_end_that_cannot_be_taken_in_fails_its_job_and_no_other(rank, monkeypatch, caplog):
    monkeypatch.setattr(
        rank.half._jobs, "load_copied", mock.Mock(side_effect=[ValueError("injected"), None])
    )
    rank.half.start_kv_transfers(rank.plan(loads=[load(0, "a", (1, 1)), load(1, "b", (2, 2))]))
    assert rank.transfer.wait(120)
    rank.half.poll()
    assert rank.half.ended().ranks[0].jobs == {0: Outcome.FAILED, 1: Outcome.OK}
    assert "injected" in caplog.text


def test_a_step_that_was_cut_short_is_told_once_and_stores_nothing(rank):
    rank.begin(store(0, (1, 2)), loads=[load(1, "a", (3, 4))], admissions=7)
    rank.step()
    report = RankReport({0: Outcome.FAILED, 1: Outcome.OK}, aborted_step=7)
    assert rank.report() == report
    rank.step()
    assert rank.half.report() is None


@pytest.mark.parametrize("index", [0, 1])
def test_bytes_and_seconds_are_counted(index):
    """Those of single loads on the first rank alone: each rank has the same loads."""
    rank = Rank(rank=index, num_ranks=2).start()
    rank.store(store(0, (1, 2), (3, 4)))
    rank.step(loads=[load(1, "a", (5, 2))])
    # Loads that arrive together: each has its own bytes, and the time of all.
    rank.step(loads=[synchronous(2, "b", (4, 2), (5, 2)), synchronous(3, "c", (6, 2))])
    assert rank.jobs() == dict.fromkeys((1, 2, 3), Outcome.OK)
    stats = rank.stats()
    assert stats.pop("stored_seconds") > 0
    seconds = stats.pop("load_seconds", [])
    expected: dict[str, Any] = {"stored_bytes": 2 * BLOCK_BYTES, "loaded_bytes": 4 * BLOCK_BYTES}
    if index == 0:
        assert sum(seconds[:2]) == stats["loaded_seconds"]
        assert seconds[1] == seconds[2]
        expected["load_bytes"] = [BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES]
    assert stats.pop("loaded_seconds") > 0
    assert stats == expected
    assert rank.half.take_stats(2) is not None, "errors of hooks count, too"
    assert rank.stats() == {}
    rank.half.shutdown()
