"""Copies that no forward waits for: stores and asynchronous loads."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed")

import torch
from kv_swap.engine import Direction, SwapJob
from kv_swap.errors import JobError
from kv_swap.host.engine import HostSwapEngine

from kv_offload.messages import LoadJob
from tests.support.rank import NO_BLOCK, Gate, Rank, load, metadata_of, pairs, result, store


@pytest.mark.parametrize("submit", ["start_kv_transfers", "submit_stores"])
def test_stores_start_with_the_next_step(rank: Rank, submit: str) -> None:
    rank.end(rank.begin(store(0, (1, 2))))
    assert rank.transfer.in_flight == 0
    assert rank.report().stores == {}
    if submit == "submit_stores":
        rank.half.submit_stores()
    else:
        rank.begin()
    assert rank.transfer.in_flight == 1


def test_a_store_copies_what_is_there_when_it_is_submitted(rank: Rank) -> None:
    """The forward of the step that planned it runs between planning and submitting."""
    metadata = rank.begin(store(0, (1, 2)))
    rank.kv[1] = 77
    rank.end(metadata)
    rank.step()
    rank.kv[1] = 0
    rank.step(loads=[load(0, "a", (5, 2))])
    assert (rank.kv[5] == 77).all()


def test_each_step_queues_its_stores_once(rank: Rank) -> None:
    """Also where both hooks that end a step are called."""
    for job_id in (0, 1):
        metadata = metadata_of([store(job_id, (job_id, job_id))])
        for _ in range(3):
            rank.half.prepare_store_kv(metadata)
    rank.half.prepare_store_kv(metadata_of())
    rank.half.submit_stores()
    rank.half.submit_stores()
    assert rank.transfer.in_flight == 2


def test_a_store_is_reported_once_when_it_has_ended(rank: Rank, gate: Gate) -> None:
    gate.opened.clear()
    rank.end(rank.begin(store(0, (1, 2)), store(1, (3, 4))))
    assert rank.half.take_report() is None
    rank.end(rank.begin())
    assert rank.half.take_report() is None, "it runs"
    gate.opened.set()
    rank.step()
    assert rank.report().stores == {0: result(), 1: result()}
    rank.step()
    assert rank.half.take_report() is None


def test_a_store_that_fails_is_reported_as_such(rank: Rank, gate: Gate) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    gate.failing = True
    rank.step()
    assert rank.report().stores == {0: result(ok=False), 1: result(ok=False)}
    assert rank.half.reports.take_stats() is None


def test_a_store_that_is_refused_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch, rank: Rank
) -> None:
    """Because its block does not exist, or its slot is not ready."""
    monkeypatch.setattr(HostSwapEngine, "ready_slots", property(lambda _: 4))
    rank.step(store(0, (NO_BLOCK, 2)), store(1, (3, 3)), store(2, (1, 4)))
    rank.step()
    assert rank.report().stores == {0: result(ok=False), 1: result(), 2: result(ok=False)}
    with pytest.raises(JobError, match="slot 4, valid are 0 to 3 until more of 8 are page-locked"):
        rank.transfer.submit(SwapJob(9, Direction.LOAD, pairs((1, 4))))


def test_who_asks_hears_of_what_has_ended_by_then(rank: Rank) -> None:
    rank.step(store(0, (1, 2)))
    metadata = rank.begin()
    assert rank.transfer.wait(120)
    assert rank.half.take_ended_stores() == {0: result()}
    rank.end(metadata)
    rank.begin(loads=[load(0, "a", (5, 2))])
    assert rank.transfer.wait(120)
    assert rank.half.take_ended_loads() == ({"a"}, set())


# -- drains ------------------------------------------------------------------------------------


def test_a_drain_ends_stores_that_are_queued_or_not_sent(rank: Rank) -> None:
    before = rank.kv.clone()
    rank.step(store(0, (1, 2)))
    assert rank.half.drain([store(1, (3, 4))], [0, 1]).stores == {0: result(), 1: result()}
    assert rank.transfer.in_flight == 0
    rank.kv[:] = -1
    rank.step(loads=[load(0, "a", (1, 2), (3, 4))])
    assert torch.equal(rank.kv[[1, 3]], before[[1, 3]])


def test_a_drain_waits_for_what_runs(rank: Rank, gate: Gate) -> None:
    gate.opened.clear()
    rank.end(rank.begin(store(0, (1, 2))))
    threading.Timer(0.1, gate.opened.set).start()
    assert rank.half.drain([], [0]).stores == {0: result()}


def test_a_drain_answers_for_what_has_come_and_is_asked_for(rank: Rank) -> None:
    """The scheduler asks for what it has no report of, and takes both answers."""
    rank.step(store(0, (1, 2)))
    for _ in range(2):
        assert rank.half.drain([], [0, 1, 7]).stores == {0: result()}
    assert rank.half.drain([], []).stores == {}
    assert rank.report().stores == {0: result()}
    assert rank.half.drain([], [0]).stores == {0: result()}


def test_a_drain_does_not_take_a_store_for_done_that_never_came(rank: Rank) -> None:
    """An error of the engine may keep a step's plan from its ranks."""
    rank.step(store(0, (1, 2)))
    rank.step(store(2, (3, 4)))
    answers = rank.half.drain([], [0, 1, 2]).stores
    assert answers == {0: result(), 1: result(ok=False), 2: result()}


def test_a_drain_remembers_failures(rank: Rank, gate: Gate) -> None:
    rank.store(store(0, (1, 2)), store(1, (NO_BLOCK, 3)))
    gate.failing = True
    answers = rank.half.drain([store(2, (3, 4))], [0, 1, 2]).stores
    assert answers == {0: result(), 1: result(ok=False), 2: result(ok=False)}


def test_a_drain_does_not_answer_for_a_store_that_an_error_kept_from_starting(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot would become readable without a copy."""
    fail = mock.Mock(side_effect=RuntimeError("injected"))
    monkeypatch.setattr(rank.half, "submit_stores", fail)
    assert rank.half.drain([store(0, (1, 2))], [0]).stores == {}
    monkeypatch.undo()
    assert rank.half.drain([], [0]).stores == {0: result()}


# -- asynchronous loads ------------------------------------------------------------------------


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


def test_a_request_that_loads_again_is_not_told_of_its_first_load(rank: Rank, gate: Gate) -> None:
    """It would run while the second load still writes its blocks."""
    rank.step(loads=[load(0, "a", (1, 2))])
    rank.half.reports.take_received()
    gate.opened.clear()
    rank.begin(loads=[load(1, "a", (3, 2))])
    assert rank.half.take_ended_loads() == (set(), set())


@pytest.mark.parametrize(
    ("failing", "job"),
    [
        (True, load(0, "a", (1, 2), (4, 3))),
        (False, load(0, "a", (1, 2), (4, 1000))),
        (False, load(0, "a", (1, 2), (4, 3), incomplete=True)),
    ],
    ids=["copy", "slot", "plan"],
)
def test_a_load_that_fails_leaves_zeros_and_is_told_twice(
    rank: Rank, gate: Gate, failing: bool, job: LoadJob
) -> None:
    """As received, because its blocks are free of copies now, and as failed."""
    before = rank.kv.clone()
    gate.failing = failing
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
    """Failed ones end like the others if who drains takes their blocks back."""
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    gate.opened.clear()
    metadata = rank.begin(loads=[load(0, "a", (1, 2)), load(1, "b", (3, 1000))])
    assert rank.half.drain([], []).loading == {"a"}
    gate.opened.set()
    assert rank.transfer.wait(120)
    assert rank.half.drain([], [], {"a", "b"}).loading == set()
    rank.end(metadata)
    assert rank.half.reports.take_received() == ({"a", "b"}, {})
