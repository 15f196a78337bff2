"""Loads that the forward of their step reads: arriving whole or in waves, made good, lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.errors import CopyError
from kv_swap.host.engine import HostSwapEngine
from kv_swap.memory.arena import HostArena

from kv_offload.messages import Outcome
from kv_offload.worker.forward_loads import ForwardLoads
from kv_offload.worker.jobs import RankJobs
from tests.support.kv_memory import layered_cache
from tests.support.played_cuda import COMPUTE, PlayedCuda
from tests.support.rank import BLOCK_BYTES, NO_BLOCK, Rank, load, store, synchronous

OK, FAILED, LOST = Outcome.OK, Outcome.FAILED, Outcome.LOST


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank of two layers whose calls have been learned; slot 2 has what block 1 had of both."""
    monkeypatch.setattr("kv_offload.worker.forward_loads.WAVES_FROM_BYTES", 0)
    monkeypatch.setattr("kv_offload.worker.waves.LEAST_WAVE_BYTES", 1)
    rank = Rank(layers=2).start()
    rank.layers_call()
    learn(rank, store(0, (1, 2)))
    rank.step()
    rank.report()
    rank.poison()
    yield rank
    rank.half.shutdown()


def learn(rank: Rank, *jobs: Any) -> None:
    """Run a step in which both layers call."""
    metadata = rank.begin(*jobs)
    rank.call("layer.0", "layer.1")
    rank.end(metadata)


@pytest.fixture
def stored(rank: Rank) -> Rank:
    rank.store(store(0, (1, 2)))
    rank.poison()
    rank.stats()
    return rank


def test_a_layer_has_its_bytes_after_its_call(layers, monkeypatch):
    """And the forward itself waits for the first wave: what reads it need not be such a layer."""
    await_wave = mock.Mock(wraps=layers.transfer.await_wave)
    monkeypatch.setattr(layers.transfer, "await_wave", await_wave)
    metadata = layers.begin(loads=[synchronous(1, "a", (4, 2))])
    await_wave.assert_called_once_with(0)
    assert layers.holds(4) == [True, False]
    layers.call("layer.0")
    assert layers.holds(4) == [True, False]
    layers.call("layer.1")
    assert layers.holds(4) == [True, True]
    layers.end(metadata)
    assert layers.half.on_layer is None
    assert layers.jobs() == {1: OK}


@pytest.mark.parametrize("aborted_step", [False, True])
@pytest.mark.parametrize("polled", ["before", "after", "late"])
def test_a_load_of_which_a_layer_did_not_call_is_lost(layers, aborted_step, polled):
    metadata = layers.begin(loads=[synchronous(1, "a", (4, 2))])
    layers.call("layer.0")
    if polled == "before":
        assert layers.transfer.wait(120)
        layers.half.poll()
        assert layers.half.ended().ranks[0].jobs == {}, "the other layer may still read it early"
    if aborted_step:
        metadata = layers.begin()
    layers.half.prepare_store_kv(metadata)
    assert all(layers.holds(4)), "nothing may write the block once the step has ended"
    assert layers.half.ended().ranks[0].jobs == {1: LOST}
    if polled == "after":
        layers.half.poll()
    assert layers.jobs() == {1: LOST}
    metadata = layers.begin(loads=[synchronous(2, "b", (5, 2))])
    assert (layers.half.on_layer is not None) == aborted_step, "a step cut short shows nothing"
    if aborted_step:
        layers.call("layer.0", "layer.1")
    layers.end(metadata)
    assert layers.jobs() == {2: OK}, "and the first one is not told again"


def test_a_load_that_arrived_before_its_forward_ended_is_told_of_then(layers):
    metadata = layers.begin(loads=[synchronous(1, "a", (4, 2))])
    layers.call("layer.0", "layer.1")
    assert layers.transfer.wait(120)
    layers.half.poll()
    assert layers.half.ended().ranks[0].jobs == {}
    layers.half.prepare_store_kv(metadata)
    assert layers.half.ended().ranks[0].jobs == {1: OK}
    assert layers.stats()["loaded_bytes"] == 2 * BLOCK_BYTES


def test_a_load_that_arrived_before_its_forward_is_told_of(stored):
    """It may be asked for what has ended at any time, also while the engine prepares the step."""
    metadata = stored.plan(loads=[synchronous(1, "a", (4, 2))])
    stored.half.start_copies(metadata, first=True)
    assert stored.transfer.wait(120)
    stored.half.poll()
    stored.half.start_kv_transfers(metadata)
    stored.end(metadata)
    assert stored.jobs() == {1: OK}


@pytest.mark.parametrize("kind", ["small", "whole", "asynchronous"])
def test_other_loads_arrive_whole(layers, monkeypatch, kind):
    if kind == "small":
        limit = "kv_offload.worker.forward_loads.WAVES_FROM_BYTES"
        monkeypatch.setattr(limit, 2 * BLOCK_BYTES + 1)
    job = load(1, "a", (4, 2), synchronous=kind != "asynchronous", whole=kind == "whole")
    metadata = layers.begin(loads=[job])
    assert layers.half.on_layer is None
    if kind == "asynchronous":
        assert layers.transfer.wait(120)
    assert all(layers.holds(4))
    layers.end(metadata)
    assert layers.jobs() == {1: OK}


def test_without_a_way_to_write_the_table_loads_arrive_whole(monkeypatch):
    monkeypatch.setattr("kv_offload.worker.forward_loads.WAVES_FROM_BYTES", 0)
    monkeypatch.setattr("kv_offload.worker.waves.LEAST_WAVE_BYTES", 1)
    fail = mock.Mock(side_effect=CopyError("no table"))
    monkeypatch.setattr(HostSwapEngine, "set_waves", fail)
    rank = Rank(layers=2).start()
    rank.layers_call()
    learn(rank)
    metadata = rank.begin(loads=[synchronous(0, "a", (4, 2))])
    assert rank.half.on_layer is None
    rank.end(metadata)
    assert rank.jobs() == {0: OK}
    assert "repaired_loads" not in rank.stats(), "no load is asked for waves any more"
    rank.half.shutdown()


def fail_once(rank: Rank, monkeypatch: pytest.MonkeyPatch, method: str, **when: int) -> None:
    """Have a method of the transfer engine raise at its next call, or that with this argument."""
    original = getattr(rank.transfer, method)

    def failing(*arguments: int) -> None:
        if not when or arguments == tuple(when.values()):
            monkeypatch.setattr(rank.transfer, method, original)
            raise CopyError(f"injected into {method}")
        original(*arguments)

    monkeypatch.setattr(rank.transfer, method, failing)


@pytest.mark.parametrize(("method", "copied"), [("submit", 2), ("await_loads", 4)])
def test_a_load_that_fails_before_the_forward_is_made_good(stored, monkeypatch, method, copied):
    fail_once(stored, monkeypatch, method)
    metadata = stored.begin(loads=[synchronous(1, "a", (4, 2)), synchronous(2, "b", (5, 2))])
    assert stored.holds(4) == stored.holds(5) == [True]
    stored.end(metadata)
    assert stored.jobs() == {1: OK, 2: OK}
    stats = stored.stats()
    assert stats["repaired_loads"] == 2
    assert stats["loaded_bytes"] == copied * BLOCK_BYTES
    assert not {"load_bytes", "load_seconds"} & stats.keys(), "their time says nothing"


@pytest.mark.parametrize("wave", [0, 1])
def test_a_wave_that_fails_is_made_good_before_its_layer(layers, monkeypatch, wave):
    fail_once(layers, monkeypatch, "await_wave", wave=wave)
    metadata = layers.begin(loads=[synchronous(1, "a", (4, 2))])
    layers.call("layer.0", "layer.1")
    assert all(layers.holds(4))
    assert layers.half.on_layer is None, "no layer waits any more"
    layers.end(metadata)
    assert layers.jobs() == {1: OK}


@pytest.mark.parametrize("before", [True, False])
def test_copies_that_fail_are_made_good_before_the_forward_and_lost_after_it(
    stored, monkeypatch, before
):
    metadata = stored.plan(loads=[synchronous(1, "a", (4, 2))])
    (stored.half.start_copies if before else stored.half.start_kv_transfers)(metadata)
    ended = [replace(done, error=CopyError("injected")) for done in stored.transfer.poll()]
    assert ended
    with monkeypatch.context() as patch:
        patch.setattr(stored.transfer, "poll", lambda: ended)
        stored.half.poll()
    stored.poison()
    stored.half.start_kv_transfers(metadata)
    assert stored.holds(4) == [before]
    stored.end(metadata)
    assert stored.jobs() == {1: OK if before else LOST}


@pytest.mark.parametrize("first", [OK, LOST])
def test_what_cannot_be_made_good_is_lost(stored, monkeypatch, first):
    """What host memory lacks, and what cannot be copied at once either."""
    if first is LOST:
        fail_once(stored, monkeypatch, "load_now")
    stored.step(loads=[synchronous(1, "a", (4, 2)), synchronous(2, "b", (5, 2), incomplete=True)])
    assert stored.holds(4) + stored.holds(5) == [first is OK, False]
    assert stored.jobs() == {1: first, 2: LOST}


@pytest.mark.parametrize("started", [False, True])
def test_a_step_that_an_error_interrupted_copies_at_once(stored, started):
    metadata = stored.plan(loads=[synchronous(1, "a", (4, 2)), load(2, "b", (5, 2))])
    if started:
        stored.half.start_copies(metadata)
    stored.half.rescue(metadata)
    assert stored.holds(4) == [True]
    assert stored.transfer.wait(120)
    stored.end(metadata)
    assert stored.jobs() == {1: OK, 2: OK if started else FAILED}
    assert stored.holds(5) == [True] if started else not stored.kv[5].any()


@pytest.mark.parametrize("refused", [False, True])
def test_a_load_whose_step_is_cut_short_before_the_forward_ends(layers, refused):
    """One that no copy writes is lost at once; no request may wait for its slots forever."""
    metadata = layers.plan(loads=[synchronous(1, "a", (NO_BLOCK if refused else 4, 2))])
    layers.half.start_copies(metadata) if refused else layers.half.begin_step(metadata)
    layers.end(layers.begin())
    assert layers.jobs() == {1: LOST}


def test_compute_waits_for_a_load_whose_step_is_cut_short_before_the_forward(monkeypatch):
    """Else its copies would overwrite what later steps compute in its blocks."""
    cuda = PlayedCuda()
    cuda.install(monkeypatch)
    layout, storage, pages = layered_cache(2, 8, 64)
    device = torch.device("cuda", 0)
    arena = HostArena(4, layout.slot_bytes, register=CudaRegistrar(device))
    jobs = RankJobs(0)
    jobs.transfer = CudaSwapEngine(layout, arena, device, [storage])
    arena.view()[:] = 7
    loads = ForwardLoads(jobs, lambda: None)
    loads.take([synchronous(1, "a", (3, 2))])
    loads.start(after_compute=False)
    loads.take([])
    assert jobs.ended == {1: LOST}
    cuda.queue(lambda: pages[:, 3].fill(9))
    cuda.run(COMPUTE)
    cuda.run()
    assert (pages[:, 3] == 9).all()
    jobs.transfer.close()
