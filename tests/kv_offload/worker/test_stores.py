"""Stores: they start with the next step. And drains, which end all copies between two steps."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from kv_swap.engine import Direction, SwapJob
from kv_swap.errors import JobError
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import Packing
from kv_swap.packing import samples
from kv_swap.packing.format import TILE_BYTES, tile_columns
from kv_swap.packing.tiles import count_escapes

from kv_offload.messages import Outcome
from tests.support.rank import NO_BLOCK, Rank, load, pairs, refuse_blocks, store

OK, FAILED = Outcome.OK, Outcome.FAILED


@pytest.mark.parametrize("submit", ["begin", "submit_stores"])
def test_stores_start_once_with_the_next_step_and_are_told_when_they_have_ended(rank, gate, submit):
    gate.opened.clear()
    metadata = rank.begin(store(0, (1, 2)), store(1, (3, 4)))
    for _ in range(3):  # more than one hook ends a step
        rank.end(metadata)
    assert rank.transfer.in_flight == 0
    rank.begin() if submit == "begin" else rank.half.submit_stores()
    rank.half.submit_stores()
    assert rank.transfer.in_flight == 2
    rank.half.poll()
    assert rank.half.report() is None, "they run"
    gate.opened.set()
    rank.step()
    assert rank.jobs() == {0: OK, 1: OK}


def test_a_store_copies_what_is_there_when_it_is_submitted(rank):
    """The forward of the step that planned it runs between planning and submitting."""
    metadata = rank.begin(store(0, (1, 2)))
    rank.kv[1] = 77
    rank.end(metadata)
    rank.step()
    rank.kv[1] = 0
    rank.step(loads=[load(1, "a", (5, 2))])
    assert (rank.kv[5] == 77).all()


def test_a_store_that_fails_is_reported_as_such(rank, gate):
    gate.failing = True
    assert rank.store(store(0, (1, 2)), store(1, (3, 4))) == {0: FAILED, 1: FAILED}
    assert rank.stats() == {}


def test_a_store_that_is_refused_is_reported_as_such(monkeypatch, rank):
    monkeypatch.setattr(HostSwapEngine, "ready_slots", property(lambda _: 4))
    told = rank.store(store(0, (NO_BLOCK, 2)), store(1, (3, 3)), store(2, (1, 4)))
    assert told == {0: FAILED, 1: OK, 2: FAILED}
    with pytest.raises(JobError, match="slot 4, valid are 0 to 3 until more of 8 are page-locked"):
        rank.transfer.submit(SwapJob(9, Direction.LOAD, pairs((1, 4))))


def test_blocks_that_do_not_fit_are_told_until_the_scheduler_knows(rank, monkeypatch):
    refuse_blocks(monkeypatch, rank, 3, 5)
    rank.step(store(0, (1, 2), (3, 4), (5, 6)), store(1, (2, 3)))
    rank.step()
    told = rank.report()
    assert (told.jobs, told.failed_rows) == ({0: OK, 1: OK}, {0: (1, 2)})
    assert rank.half.ended().ranks[0] == told
    rank.step(known=(1,))
    assert rank.report().failed_rows == {0: (1, 2)}
    rank.step(known=(0,))
    assert rank.half.report() is None
    assert rank.drain(store(2, (3, 1))) == {2: OK}
    assert rank.report().failed_rows == {2: (0,)}


def test_random_bits_do_not_fit_and_what_is_stored_beside_them_comes_back(monkeypatch):
    """With pages that are packed. Escapes of refused slots do not count."""
    monkeypatch.setattr(samples, "SAMPLED_TILES", 1)
    kv = torch.randn((4, 512, 64), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    kv[2].view(torch.int16).random_(-(1 << 15), 1 << 15)
    kv[3, :64].view(torch.int16).random_(-(1 << 15), 1 << 15)  # a tile of four has room
    first = kv.view(torch.int16).clone()
    kept = first[[1, 3]].view(torch.uint8).numpy().reshape(-1, TILE_BYTES)
    escapes = count_escapes(kept, tile_columns(Packing(8), 0))
    rank = Rank(cpu_bytes=4 << 16)
    rank.engine.packings = {"layer.0": Packing(8)}
    rank.layers = {"layer.0": kv}
    rank.start()
    assert rank.half.capacity().slot_bytes < 1 << 16
    rank.step(store(0, (1, 0), (2, 1), (3, 2)))
    rank.step()
    told = rank.report()
    assert (told.jobs, told.failed_rows) == ({0: OK}, {0: (1,)})
    stats = rank.stats()
    assert stats["stored_bytes"] == 3 << 16
    assert (stats["sampled_tiles"], stats["sampled_raw_tiles"]) == (2 * 4, 1)
    assert stats["sampled_escapes"] == escapes.sum() - escapes.max() > 0, "without the raw tile"
    kv.zero_()
    rank.step(loads=[load(1, "a", (1, 0), (0, 2))])
    assert torch.equal(kv.view(torch.int16)[[1, 0]], first[[1, 3]])
    rank.half.shutdown()


def test_whatever_refuses_a_store_does_not_end_the_engine(monkeypatch, rank, caplog):
    fail = mock.Mock(side_effect=RuntimeError("injected"))
    monkeypatch.setattr(rank.transfer, "submit", fail)
    assert rank.store(store(0, (1, 2))) == {0: FAILED}
    assert "rank 0: RuntimeError('injected')" in caplog.text


def test_a_step_that_ends_with_an_error_fails_its_stores(rank):
    metadata = rank.begin(store(0, (1, 2)))
    rank.half.end_step_anyhow(metadata)
    rank.half.prepare_store_kv(metadata)
    assert rank.jobs() == {0: FAILED}
    rank.step()
    assert rank.jobs() == {}


def test_a_drain_ends_what_is_queued_or_not_sent_and_what_runs(rank, gate):
    before = rank.kv.clone()
    gate.opened.clear()
    rank.end(rank.begin(store(0, (1, 2)), loads=[load(1, "a", (5, 0)), load(2, "b", (6, 1000))]))
    threading.Timer(0.1, gate.opened.set).start()
    assert rank.drain(store(3, (3, 4))) == {0: OK, 1: OK, 2: FAILED, 3: OK}
    assert rank.transfer.in_flight == 0
    rank.poison()
    rank.step(loads=[load(4, "c", (1, 2), (3, 4))])
    assert torch.equal(rank.kv[[1, 3]], before[[1, 3]])


def test_a_drain_is_bounded(rank, gate, monkeypatch):
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.1)
    gate.opened.clear()
    rank.step(store(0, (1, 2)))
    # Without a bound it would wait for the gate, and tell of both.
    assert rank.drain(store(1, (3, 4))) == {}
    gate.opened.set()
    assert rank.drain() == {0: OK, 1: OK}


@pytest.mark.parametrize("site", ["wait", "submit_stores"])
def test_a_drain_in_which_something_raises_tells_what_has_ended(rank, monkeypatch, site):
    """Of a store that has not started, the slot would be read before it is written."""
    rank.store(store(0, (1, 2)))
    fail = mock.Mock(side_effect=RuntimeError("injected"))
    monkeypatch.setattr(rank.transfer if site == "wait" else rank.half, site, fail)
    assert rank.drain(store(1, (3, 4)), known=()) == {0: OK}
    monkeypatch.undo()
    assert rank.drain(known=()) == {0: OK, 1: OK}
