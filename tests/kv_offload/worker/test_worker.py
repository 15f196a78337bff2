"""The order of a step, and what survives an error in the middle of one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed")

import torch

from tests.support.rank import Rank, load, metadata_of, result, store, synchronous


def test_copies_start_before_the_step_is_prepared_and_the_forward_waits_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, rank: Rank
) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    rank.step(store(2, (1, 6)))
    told: list[str] = []
    submit, await_loads = rank.transfer.submit, rank.transfer.await_loads
    monkeypatch.setattr(
        rank.transfer, "submit", lambda job: (told.append(job.direction.value), submit(job))
    )
    monkeypatch.setattr(rank.transfer, "await_loads", lambda: (told.append("await"), await_loads()))
    metadata = metadata_of([], [load(1, "b", (6, 4)), synchronous(0, "a", (5, 2))])
    rank.half.start_copies(metadata)
    assert told == ["store", "load", "load"]
    assert torch.equal(rank.kv[5], rank.kv[1]), "what the forward reads starts first"
    rank.half.submit_stores()
    rank.half.start_kv_transfers(metadata)
    assert told == ["store", "load", "load", "await"], "each started once"
    assert rank.transfer.wait(10)
    rank.end(metadata)
    assert torch.equal(rank.kv[6], rank.kv[3])
    rank.step()
    assert told == ["store", "load", "load", "await"]


def test_a_hook_starts_what_an_error_kept_an_earlier_one_from_starting(
    monkeypatch: pytest.MonkeyPatch, rank: Rank
) -> None:
    rank.store(store(0, (1, 2)))
    metadata = metadata_of([], [synchronous(0, "a", (5, 2)), load(1, "b", (6, 2))])

    def fail() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rank.half, "submit_stores", fail)
    with pytest.raises(RuntimeError, match="injected"):
        rank.half.start_copies(metadata)
    monkeypatch.undo()
    rank.half.start_kv_transfers(metadata)
    assert torch.equal(rank.kv[5], rank.kv[1])
    assert rank.transfer.wait(10)
    rank.end(metadata)
    assert torch.equal(rank.kv[6], rank.kv[1])
    assert rank.half.reports.take_received() == ({"b"}, {})
    assert rank.report().loads == {0: frozenset({0})}


def test_a_step_that_ends_with_an_error_fails_its_stores(rank: Rank) -> None:
    metadata = rank.begin(store(0, (1, 2)))
    rank.half.end_step_anyhow(metadata)
    rank.half.prepare_store_kv(metadata)
    assert rank.report().stores == {0: result(ok=False)}
    rank.step()
    assert rank.report().stores == {}
    assert rank.half.drain([], [0]).stores == {0: result(ok=False)}


def test_a_drain_in_which_something_raises_tells_what_has_ended(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.step(store(0, (1, 2)))
    rank.step()

    def fail(timeout_seconds: float) -> bool:
        raise RuntimeError("injected")

    monkeypatch.setattr(rank.transfer, "wait", fail)
    assert rank.half.drain([store(1, (3, 4))], [0, 1]).stores == {0: result()}
    monkeypatch.undo()
    assert rank.half.drain([], [0, 1]).stores == {0: result(), 1: result()}


def test_weights_that_a_rank_was_given_are_reported_once() -> None:
    rank = Rank(rank=1, num_ranks=2)
    assert rank.half.weight_loads == {}
    rank.start()
    assert rank.report().ready_slots == {1: 8}
    assert rank.half.take_report() is None
    rank.engine.weight_loads = 3
    assert rank.report().weight_loads == rank.half.weight_loads == {1: 3}
    assert rank.half.take_report() is None
    rank.half.shutdown()
