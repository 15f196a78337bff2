"""Asynchronous loads: their requests wait until they have ended."""

from __future__ import annotations

import pytest
import torch

from kv_offload.messages import Outcome
from tests.support.rank import NO_BLOCK, load, store

OK, FAILED = Outcome.OK, Outcome.FAILED


def test_a_load_brings_back_what_was_stored(rank):
    before = rank.kv.clone()
    rank.store(store(0, (1, 2), (3, 0), (6, 7)))
    rank.poison()
    rank.step(loads=[load(1, "a", (4, 0), (5, 7)), load(2, "b", (0, 2))])
    assert rank.jobs() == {1: OK, 2: OK}
    assert torch.equal(rank.kv[[4, 5, 0]], before[[3, 6, 1]])
    assert (rank.kv[[1, 2, 3, 6, 7]] == -1).all()


def test_a_load_starts_in_its_own_step_and_is_told_when_it_has_ended(rank, gate):
    gate.opened.clear()
    metadata = rank.begin(loads=[load(0, "a", (1, 2))])
    assert rank.transfer.in_flight == 1
    rank.end(metadata)
    assert rank.jobs() == {}
    gate.opened.set()
    rank.step()
    assert rank.jobs() == {0: OK}


def test_a_load_that_no_hook_started_fails(rank):
    metadata = rank.plan(loads=[load(0, "a", (1, 2))])
    rank.half.begin_step(metadata)
    rank.half.end_step_anyhow(metadata)
    rank.step()
    assert rank.jobs() == {0: FAILED}


@pytest.mark.parametrize(
    ("failing", "job"),
    [
        (True, load(1, "a", (1, 2), (4, 3))),
        (False, load(1, "a", (1, 2), (4, 1000))),
        (False, load(1, "a", (1, 2), (4, 3), incomplete=True)),
    ],
    ids=["copy", "slot", "plan"],
)
def test_a_load_that_fails_leaves_zeros_and_does_not_touch_the_next_one(rank, gate, failing, job):
    before = rank.kv.clone()
    rank.store(store(0, (6, 5)))
    gate.failing = failing
    rank.step(loads=[job])
    gate.failing = False
    assert rank.jobs() == {1: FAILED}
    assert (rank.kv[[1, 4]] == 0).all()
    others = [0, 2, 3, 5, 6, 7]
    assert torch.equal(rank.kv[others], before[others])
    rank.step(loads=[load(2, "good", (2, 5))])
    assert rank.jobs() == {2: OK}
    assert torch.equal(rank.kv[2], before[6])


def test_a_block_that_cannot_be_zeroed_does_not_end_the_engine(rank, caplog):
    rank.step(loads=[load(0, "a", (NO_BLOCK, 2))])
    assert rank.jobs() == {0: FAILED}
    assert f"rank 0: block {NO_BLOCK} does not exist" in caplog.text
