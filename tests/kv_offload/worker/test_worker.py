"""The order of a step, what survives an error in the middle of one, sleep and the end."""

from __future__ import annotations

import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
from kv_swap.engine import SwapJob
from kv_swap.errors import CopyError

from kv_offload.messages import Outcome
from tests.support.rank import Rank, load, store, synchronous


@pytest.mark.parametrize("failing", [False, True])
def test_copies_start_before_the_step_is_prepared_and_the_forward_waits_before_it_runs(
    monkeypatch, rank, failing
):
    """Or just before it runs, if an error kept an earlier hook from starting them."""
    rank.step(store(0, (1, 2)), store(1, (3, 4)))
    rank.step(store(2, (1, 6)))
    told: list[str] = []
    submit, await_loads = rank.transfer.submit, rank.transfer.await_loads

    def note(job: SwapJob) -> None:
        told.append("first load" if job.before_compute else job.direction.value)
        submit(job)

    monkeypatch.setattr(rank.transfer, "submit", note)
    monkeypatch.setattr(rank.transfer, "await_loads", lambda: (told.append("await"), await_loads()))
    metadata = rank.plan(loads=[load(3, "b", (6, 4)), synchronous(4, "a", (5, 2))])
    if failing:
        fail = mock.Mock(side_effect=RuntimeError("injected"))
        with mock.patch.object(rank.half, "submit_stores", fail), pytest.raises(RuntimeError):
            rank.half.start_copies(metadata)
    else:
        rank.half.start_copies(metadata)
        assert told == ["store", "first load", "load"], "what the forward reads starts first"
        rank.half.submit_stores()
    rank.half.start_kv_transfers(metadata)
    assert torch.equal(rank.kv[5], rank.kv[1])
    assert told == ["store", "first load", "load", "await"], "each started once"
    assert rank.transfer.wait(120)
    rank.end(metadata)
    assert torch.equal(rank.kv[6], rank.kv[3])
    assert rank.jobs() == dict.fromkeys(range(5), Outcome.OK)
    rank.step()
    assert told == ["store", "first load", "load", "await"]


def test_a_plan_that_cannot_be_taken_in_does_not_lose_what_its_forward_reads(rank, monkeypatch):
    rank.store(store(0, (1, 2)))
    rank.poison()
    metadata = rank.plan(loads=[synchronous(1, "a", (5, 2))])
    moves = mock.Mock(side_effect=RuntimeError("injected"))
    monkeypatch.setattr(rank.half._moves, "start", moves)
    with pytest.raises(RuntimeError):
        rank.half.start_kv_transfers(metadata)
    rank.half.rescue(metadata)
    assert all(rank.holds(5))


@pytest.mark.parametrize("synchronous_load", [False, True])
@pytest.mark.parametrize(("idle", "first"), [(True, True), (True, False), (False, True)])
def test_a_load_runs_ahead_of_compute_only_as_the_first_of_a_step_into_idle_blocks(
    rank, monkeypatch, idle, first, synchronous_load
):
    submit = mock.Mock(wraps=rank.transfer.submit)
    monkeypatch.setattr(rank.transfer, "submit", submit)
    rank.engine.gives_idle_blocks = idle
    job = load(0, "a", (5, 2), synchronous=synchronous_load)
    rank.half.start_copies(rank.plan(loads=[job]), first=first)
    ((swap,),) = [call.args for call in submit.call_args_list]
    assert swap.after_compute == (not (idle and first))


def test_a_fence_that_is_refused_is_told(rank, monkeypatch, caplog):
    """The blocks of steps in flight may then not be given away."""
    fence = mock.Mock()
    monkeypatch.setattr(rank.transfer, "fence_loads", fence)
    assert rank.half.fence_loads()
    fence.assert_called_once_with()
    fence.side_effect = CopyError("injected")
    assert not rank.half.fence_loads()
    assert "rank 0: injected" in caplog.text


def forget_kv(rank: Rank) -> weakref.ref[torch.Tensor]:
    """Drop the test's own reference to the KV tensor."""
    tensor = weakref.ref(rank.layers.pop("layer.0"))
    gc.collect()
    return tensor


def test_shutdown_lets_go_of_the_kv_tensors(rank):
    """A reference that is left keeps GPU memory, or dangles after a sleep."""
    rank.step(store(0, (1, 2)))
    rank.step(loads=[load(1, "a", (3, 2))])
    tensor = forget_kv(rank)
    assert tensor() is not None
    rank.half.shutdown()
    gc.collect()
    assert tensor() is None


def test_shutdown_waits_for_what_runs(rank, gate):
    gate.opened.clear()
    rank.step(store(0, (1, 2)))
    rank.half.submit_stores()
    transfer = rank.transfer
    threading.Timer(0.1, gate.opened.set).start()
    rank.half.shutdown()
    assert [done.error for done in transfer.poll()] == [None]


def test_shutdown_may_come_twice_or_before_the_start():
    rank = Rank()
    rank.half.shutdown()
    rank.start()
    rank.half.shutdown()
    rank.half.shutdown()
    rank.half.poll()
    assert rank.drain() == {}
    assert rank.half.report() is None


def test_a_sleeping_rank_lets_go_of_the_kv_tensors_and_takes_them_again(rank, gate):
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
    rank.poison()
    rank.step(loads=[load(1, "a", (5, 2))])
    assert rank.holds(5) == [True]


def test_nothing_is_taken_again_that_is_gone(rank):
    rank.half.unregister_kv_caches()
    assert forget_kv(rank)() is None
    rank.half.restore_kv_caches()


def test_a_rank_whose_copies_do_not_end_keeps_the_kv_tensors(rank, gate, monkeypatch):
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    rank.step(store(0, (1, 2)))
    gate.opened.clear()
    rank.half.submit_stores()
    rank.half.unregister_kv_caches()
    tensor = forget_kv(rank)
    assert tensor() is not None
