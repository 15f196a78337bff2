"""Loads that the forward of their step reads: arriving whole or in waves, made good, lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed")

import torch
from kv_swap.errors import CopyError
from kv_swap.host.engine import HostSwapEngine

from tests.support.rank import (
    BLOCK_BYTES,
    NO_BLOCK,
    Rank,
    load,
    metadata_of,
    result,
    store,
    synchronous,
)

ENDED = frozenset({0})


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank of two layers whose calls have been learned; slot 2 has what block 1 had of both."""
    monkeypatch.setattr("kv_offload.worker.synchronous_loads.WAVES_FROM_BYTES", 0)
    rank = Rank(layers=2).start()
    rank.layers_call()
    learn(rank, store(0, (1, 2)))
    rank.step()
    rank.report()
    poison(rank)
    yield rank
    rank.half.shutdown()


def learn(rank: Rank, *jobs: Any) -> None:
    """Run a step in which both layers call."""
    metadata = rank.begin(*jobs)
    rank.call("layer.0", "layer.1")
    rank.end(metadata)


@pytest.fixture
def stored(rank: Rank) -> Rank:
    """A rank of one layer; slot 2 has what block 1 had."""
    rank.store(store(0, (1, 2)))
    poison(rank)
    return rank


def poison(rank: Rank) -> None:
    for kv in rank.layers.values():
        kv[:] = -1


def holds(rank: Rank, block: int) -> list[bool]:
    """Tell for every layer whether a block has what slot 2 has; else nothing was written to it."""
    found = []
    for kv, first in zip(rank.layers.values(), rank.first, strict=True):
        found.append(torch.equal(kv[block], first[1]))
        assert found[-1] or (kv[block] == -1).all()
    return found


def told(rank: Rank) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
    """Return which loads the ended step says have ended, on which ranks, and which are lost."""
    report = rank.report()
    return report.loads, report.lost_loads


# -- waves -------------------------------------------------------------------------------------


def test_a_layer_has_its_bytes_after_its_call(layers: Rank) -> None:
    metadata = layers.begin(loads=[synchronous(0, "a", (4, 2))])
    assert holds(layers, 4) == [True, False]
    layers.call("layer.0")
    assert holds(layers, 4) == [True, False]
    layers.call("layer.1")
    assert holds(layers, 4) == [True, True]
    layers.end(metadata)
    assert layers.half.on_layer is None
    assert told(layers) == ({0: ENDED}, set())


@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("polled", [False, True])
def test_a_load_of_which_a_layer_did_not_call_is_lost_once(
    layers: Rank, cut_short: bool, polled: bool
) -> None:
    """Also if the copies were found to have ended before the end of the forward."""
    metadata = layers.begin(loads=[synchronous(0, "a", (4, 2))])
    layers.call("layer.0")
    if polled:
        assert layers.transfer.wait(120)
        layers.half.poll()
    if cut_short:
        metadata = layers.begin()
    layers.end(metadata)
    assert all(holds(layers, 4)), "nothing may write the block once the step has ended"
    assert told(layers) == ({0: ENDED}, {0})
    layers.step(loads=[synchronous(1, "b", (5, 2))])
    assert told(layers) == ({1: ENDED}, set()), "loaded whole"
    assert layers.half.on_layer is None
    assert layers.half.drain([], []).loading == set()


def test_the_forward_itself_waits_for_the_first_wave(
    layers: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads it need not be a layer that calls."""
    await_wave = mock.Mock(wraps=layers.transfer.await_wave)
    monkeypatch.setattr(layers.transfer, "await_wave", await_wave)
    layers.begin(loads=[synchronous(0, "a", (4, 2))])
    await_wave.assert_called_once_with(0)


def test_a_lost_load_ends_only_when_its_copies_do(layers: Rank) -> None:
    """Until then its blocks are not anybody's."""
    metadata = layers.begin(loads=[synchronous(0, "a", (4, 2))])
    layers.call("layer.0")
    layers.half.prepare_store_kv(metadata)
    assert told(layers) == ({}, {0})
    layers.half.poll()
    assert told(layers) == ({0: ENDED}, set())


@pytest.mark.parametrize("kind", ["small", "whole", "asynchronous"])
def test_other_loads_arrive_whole(layers: Rank, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    job = synchronous(0, "a", (4, 2), whole=kind == "whole")
    if kind == "small":
        monkeypatch.setattr(
            "kv_offload.worker.synchronous_loads.WAVES_FROM_BYTES", 2 * BLOCK_BYTES + 1
        )
    if kind == "asynchronous":
        job = load(0, "a", (4, 2))
    metadata = layers.begin(loads=[job])
    if kind == "asynchronous":
        assert layers.transfer.wait(120)
    assert all(holds(layers, 4))
    assert layers.half.on_layer is None
    layers.end(metadata)
    assert not layers.report().lost_loads


def test_without_a_way_to_write_the_table_loads_arrive_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_offload.worker.synchronous_loads.WAVES_FROM_BYTES", 0)
    fail = mock.Mock(side_effect=CopyError("no table"))
    monkeypatch.setattr(HostSwapEngine, "set_waves", fail)
    rank = Rank(layers=2).start()
    rank.layers_call()
    learn(rank)
    metadata = rank.begin(loads=[synchronous(0, "a", (4, 2))])
    assert rank.half.on_layer is None
    rank.end(metadata)
    assert rank.report().loads == {0: ENDED}
    stats = rank.half.reports.take_stats()
    assert stats is not None
    assert "repaired_loads" not in stats.data, "no load is asked for waves any more"
    rank.half.shutdown()


# -- failures ----------------------------------------------------------------------------------


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
def test_a_load_that_fails_before_the_forward_is_made_good(
    stored: Rank, monkeypatch: pytest.MonkeyPatch, method: str, copied: int
) -> None:
    fail_once(stored, monkeypatch, method)
    stored.half.reports.take_stats()
    metadata = stored.begin(loads=[synchronous(0, "a", (4, 2)), synchronous(1, "b", (5, 2))])
    assert holds(stored, 4) == holds(stored, 5) == [True]
    assert stored.half.drain([], []).loading == set()
    stored.end(metadata)
    assert told(stored) == ({0: ENDED, 1: ENDED}, set())
    stats = stored.half.reports.take_stats()
    assert stats is not None
    assert stats.data["repaired_loads"] == 2
    assert stats.data["loaded_bytes"] == copied * BLOCK_BYTES
    assert not {"load_bytes", "load_seconds"} & stats.data.keys(), "their time says nothing"


def test_loads_that_arrive_together_count_one_by_one(stored: Rank) -> None:
    """Each has its own bytes and the time of all."""
    stored.half.reports.take_stats()
    stored.step(loads=[synchronous(0, "a", (4, 2), (5, 2)), synchronous(1, "b", (6, 2))])
    stats = stored.half.reports.take_stats()
    assert stats is not None
    assert stats.data["load_bytes"] == [2 * BLOCK_BYTES, BLOCK_BYTES]
    assert stats.data["load_seconds"] == [stats.data["loaded_seconds"]] * 2


@pytest.mark.parametrize("wave", [0, 1])
def test_a_wave_that_fails_is_made_good_before_its_layer(
    layers: Rank, monkeypatch: pytest.MonkeyPatch, wave: int
) -> None:
    fail_once(layers, monkeypatch, "await_wave", wave=wave)
    metadata = layers.begin(loads=[synchronous(0, "a", (4, 2))])
    layers.call("layer.0", "layer.1")
    assert all(holds(layers, 4))
    assert layers.half.on_layer is None, "no layer waits any more"
    layers.end(metadata)
    assert told(layers) == ({0: ENDED}, set())


def poll_a_failure(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find that the copies which have ended by now have failed."""
    ended = [replace(done, error=CopyError("injected")) for done in rank.transfer.poll()]
    assert ended
    with monkeypatch.context() as patch:
        patch.setattr(rank.transfer, "poll", lambda: ended)
        rank.half.poll()


def test_copies_that_fail_before_the_forward_are_made_good(
    stored: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = metadata_of((), [synchronous(0, "a", (4, 2))])
    stored.half.start_copies(metadata)
    poll_a_failure(stored, monkeypatch)
    poison(stored)
    stored.half.start_kv_transfers(metadata)
    assert holds(stored, 4) == [True]
    stored.end(metadata)
    assert told(stored) == ({0: ENDED}, set())


def test_copies_that_fail_after_the_forward_are_lost(
    stored: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = stored.begin(loads=[synchronous(0, "a", (4, 2))])
    poll_a_failure(stored, monkeypatch)
    stored.end(metadata)
    assert told(stored) == ({0: ENDED}, {0})


def test_a_drain_names_the_requests_whose_copies_still_run(
    stored: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored.transfer, "wait", lambda seconds: False)
    monkeypatch.setattr(stored.transfer, "poll", list)
    stored.begin(loads=[synchronous(0, "a", (4, 2))])
    assert stored.half.drain([], []).loading == {"a"}


def test_a_drain_names_lost_loads_whose_report_is_under_way(stored: Rank) -> None:
    stored.step(loads=[synchronous(0, "a", (5, 2), incomplete=True)])
    stored.report()
    assert stored.half.drain([], []).lost_loads == {0}


def test_what_cannot_be_made_good_is_lost(stored: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(stored, monkeypatch, "await_loads")
    fail_once(stored, monkeypatch, "load_now")
    stored.step(loads=[synchronous(0, "a", (4, 2))])
    assert told(stored) == ({0: ENDED}, {0})


def test_what_host_memory_lacks_is_lost_and_the_rest_made_good(stored: Rank) -> None:
    stored.step(loads=[synchronous(0, "a", (4, 2)), synchronous(1, "b", (5, 2), incomplete=True)])
    assert holds(stored, 4) == [True]
    assert told(stored) == ({0: ENDED, 1: ENDED}, {1})


@pytest.mark.parametrize("started", [False, True])
def test_a_step_that_an_error_interrupted_copies_at_once(stored: Rank, started: bool) -> None:
    metadata = metadata_of((), (synchronous(0, "a", (4, 2)), load(1, "b", (5, 2))))
    if started:
        stored.half.start_copies(metadata)
    stored.half.rescue(metadata)
    assert holds(stored, 4) == [True]
    assert stored.transfer.wait(120)
    stored.end(metadata)
    assert stored.report().loads == {0: ENDED}
    received, failed = stored.half.reports.take_received()
    assert (received, failed.keys()) == ({"b"}, set() if started else {"b"})
    assert holds(stored, 5) == [True] if started else not stored.kv[5].any()


def test_a_lost_load_that_was_refused_ends_too(layers: Rank) -> None:
    """Its step is cut short before the forward; no request may wait for its slots forever."""
    layers.half.start_copies(metadata_of((), [synchronous(0, "a", (NO_BLOCK, 2))]))
    layers.end(layers.begin())
    assert told(layers) == ({0: ENDED}, {0})


def test_stores_are_not_told_before_a_loss_that_a_poll_finds(stored: Rank) -> None:
    stored.step(store(1, (1, 5)))
    metadata = stored.begin(loads=[synchronous(0, "a", (5, 2), incomplete=True)])
    assert stored.transfer.wait(120)
    assert stored.half.take_ended_stores() == {}
    stored.end(metadata)
    report = stored.report()
    assert (report.stores, report.lost_loads) == ({1: result()}, {0})
