"""The order of a step, what survives an error in the middle of one, sleep and the end."""

from __future__ import annotations

import gc
import threading
import weakref
from unittest import mock

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed")

import torch
from kv_swap.engine import SwapJob
from kv_swap.errors import CopyError

from tests.support.rank import (
    BLOCK_BYTES,
    Gate,
    Rank,
    load,
    metadata_of,
    result,
    store,
    synchronous,
)


def test_copies_start_before_the_step_is_prepared_and_the_forward_waits_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, rank: Rank
) -> None:
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    rank.step(store(2, (1, 6)))
    told: list[str] = []
    submit, await_loads = rank.transfer.submit, rank.transfer.await_loads

    def note(job: SwapJob) -> None:
        told.append("first load" if job.before_compute else job.direction.value)
        submit(job)

    monkeypatch.setattr(rank.transfer, "submit", note)
    monkeypatch.setattr(rank.transfer, "await_loads", lambda: (told.append("await"), await_loads()))
    metadata = metadata_of([], [load(1, "b", (6, 4)), synchronous(0, "a", (5, 2))])
    rank.half.start_copies(metadata)
    assert told == ["store", "first load", "load"]
    assert torch.equal(rank.kv[5], rank.kv[1]), "what the forward reads starts first"
    rank.half.submit_stores()
    rank.half.start_kv_transfers(metadata)
    assert told == ["store", "first load", "load", "await"], "each started once"
    assert rank.transfer.wait(120)
    rank.end(metadata)
    assert torch.equal(rank.kv[6], rank.kv[3])
    rank.step()
    assert told == ["store", "first load", "load", "await"]


def test_a_hook_starts_what_an_error_kept_an_earlier_one_from_starting(
    monkeypatch: pytest.MonkeyPatch, rank: Rank
) -> None:
    rank.store(store(0, (1, 2)))
    metadata = metadata_of([], [synchronous(0, "a", (5, 2)), load(1, "b", (6, 2))])
    fail = mock.Mock(side_effect=RuntimeError("injected"))
    monkeypatch.setattr(rank.half, "submit_stores", fail)
    with pytest.raises(RuntimeError, match="injected"):
        rank.half.start_copies(metadata)
    monkeypatch.undo()
    rank.half.start_kv_transfers(metadata)
    assert torch.equal(rank.kv[5], rank.kv[1])
    assert rank.transfer.wait(120)
    rank.end(metadata)
    assert torch.equal(rank.kv[6], rank.kv[1])
    assert rank.half.reports.take_received() == ({"b"}, {})
    assert rank.report().loads == {0: frozenset({0})}


@pytest.mark.parametrize("synchronous_load", [False, True])
@pytest.mark.parametrize(("idle", "first"), [(True, True), (True, False), (False, True)])
def test_a_load_runs_ahead_of_compute_only_as_the_first_of_a_step_into_idle_blocks(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, idle: bool, first: bool, synchronous_load: bool
) -> None:
    submit = mock.Mock(wraps=rank.transfer.submit)
    monkeypatch.setattr(rank.transfer, "submit", submit)
    rank.engine.gives_idle_blocks = idle
    job = load(0, "a", (5, 2), synchronous=synchronous_load)
    rank.half.start_copies(metadata_of([], [job]), first=first)
    ((swap,),) = [call.args for call in submit.call_args_list]
    assert swap.behind_compute == (not (idle and first))


def test_a_fence_that_is_refused_is_told(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The blocks of steps in flight may then not be given away."""
    fence = mock.Mock()
    monkeypatch.setattr(rank.transfer, "fence_loads", fence)
    assert rank.half.fence_loads()
    fence.assert_called_once_with()
    fence.side_effect = CopyError("injected")
    assert not rank.half.fence_loads()
    assert "rank 0: injected" in caplog.text


def test_loads_that_an_error_kept_from_being_told_are_not_said_to_be_told(rank: Rank) -> None:
    rank.step(loads=[load(0, "a", (1, 2))])
    rank.half.reports.take_received()
    rank.half.end_step_anyhow(rank.begin())
    assert rank.half.take_ended_loads() == (set(), set())


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
    monkeypatch.setattr(rank.transfer, "wait", mock.Mock(side_effect=RuntimeError("injected")))
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


def test_bytes_and_seconds_are_counted(rank: Rank) -> None:
    rank.step(store(0, (1, 2), (3, 4)))
    rank.step(loads=[load(0, "a", (5, 2))])
    stats = rank.half.reports.take_stats()
    assert stats is not None
    assert stats.data.pop("stored_seconds") > 0
    assert stats.data.pop("load_seconds") == [stats.data.pop("loaded_seconds")]
    assert stats.data == {
        "stored_bytes": 2 * BLOCK_BYTES,
        "loaded_bytes": BLOCK_BYTES,
        "load_bytes": [BLOCK_BYTES],
    }
    assert rank.half.reports.take_stats() is None


def test_a_drain_is_bounded(rank: Rank, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    gate.opened.clear()
    rank.step(store(0, (1, 2)))
    # Without a bound it would wait for the gate, and tell of both.
    assert rank.half.drain([store(1, (3, 4))], [0]).stores == {}
    gate.opened.set()
    rank.step()
    assert rank.report().stores == {0: result(), 1: result()}


# -- the end -----------------------------------------------------------------------------------


def forget_kv(rank: Rank) -> weakref.ref[torch.Tensor]:
    """Drop the test's own reference to the KV tensor."""
    tensor = weakref.ref(rank.layers.pop("layer.0"))
    gc.collect()
    return tensor


def test_shutdown_lets_go_of_the_kv_tensors(rank: Rank) -> None:
    """A reference that is left keeps GPU memory, or dangles after a sleep."""
    rank.step(store(0, (1, 2)))
    rank.step(loads=[load(0, "a", (3, 2))])
    tensor = forget_kv(rank)
    assert tensor() is not None
    rank.half.shutdown()
    gc.collect()
    assert tensor() is None


def test_shutdown_waits_for_what_runs(rank: Rank, gate: Gate) -> None:
    gate.opened.clear()
    rank.step(store(0, (1, 2)))
    rank.half.submit_stores()
    transfer = rank.transfer
    threading.Timer(0.1, gate.opened.set).start()
    rank.half.shutdown()
    assert [done.error for done in transfer.poll()] == [None]


def test_shutdown_may_come_twice_or_before_the_start() -> None:
    rank = Rank()
    rank.half.shutdown()
    rank.start()
    rank.half.shutdown()
    rank.half.shutdown()
    rank.half.poll()
    assert rank.half.drain([], []).stores == {}
    assert rank.half.take_report() is None


# -- sleep -------------------------------------------------------------------------------------


def test_a_sleeping_rank_lets_go_of_the_kv_tensors_and_takes_them_again(
    rank: Rank, gate: Gate
) -> None:
    before = rank.kv.clone()
    rank.step(store(0, (1, 2)))
    gate.opened.clear()
    rank.half.submit_stores()
    threading.Timer(0.1, gate.opened.set).start()
    rank.half.unregister_kv_caches()
    assert rank.transfer.wait(0), "a copy would run while its memory is unmapped"
    assert rank.transfer.keep_alive(()) == ()
    rank.half.unregister_kv_caches()
    rank.half.restore_kv_caches()
    rank.half.restore_kv_caches()
    (held,) = rank.transfer.keep_alive([rank.kv])
    assert held is rank.kv
    rank.kv[:] = -1
    rank.step(loads=[load(0, "a", (5, 2))])
    assert torch.equal(rank.kv[5], before[1])


def test_nothing_is_taken_again_that_is_gone(rank: Rank) -> None:
    rank.half.unregister_kv_caches()
    assert forget_kv(rank)() is None
    rank.half.restore_kv_caches()


def test_a_rank_whose_copies_do_not_end_keeps_the_kv_tensors(
    rank: Rank, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    rank.step(store(0, (1, 2)))
    gate.opened.clear()
    rank.half.submit_stores()
    rank.half.unregister_kv_caches()
    tensor = forget_kv(rank)
    assert tensor() is not None
