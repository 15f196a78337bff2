"""A disk's slots and the index that a restart finds, beside each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.cache.slots import Slots
from kv_offload.messages import Outcome, TierCapacity
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.disk import DiskTier
from tests.support.waiting import LIMIT_SECONDS

NUM_SLOTS = 4


def start(folder: Path, num_slots: int = NUM_SLOTS) -> DiskTier:
    below = DiskTier(num_slots, partial(DiskIndex, folder / "index.sqlite", {}))
    below.open({0: TierCapacity(num_slots, "file")})
    return below


def copy(kind: Kind, keys: list[bytes], places: Slots) -> Transfer:
    return Transfer(0, kind, np.zeros(len(keys), np.int32), keys=keys, tier_slots=places)


def begin(below: DiskTier, *keys: bytes) -> Transfer:
    rows, places = below.begin_write(keys)
    assert len(rows) == len(keys)
    return copy(Kind.DEMOTE, [*keys], places)


def end(below: DiskTier, move: Transfer, *, ok: bool = True) -> None:
    below.end_write(move, np.full(len(move.keys), not ok))


def fail(move: Transfer, *rows: int) -> np.ndarray:
    """Have an error fail some rows of a move, or all of them."""
    move.outcome = Outcome.FAILED
    failed = np.zeros(len(move.keys), bool)
    failed[[*rows] or slice(None)] = True
    return failed


def aside(below: DiskTier) -> float:
    below.check_integrity()
    return below.gauges()["tier_slots_set_aside"]


def restart(below: DiskTier, folder: Path) -> DiskTier:
    """End a tier and start the next one; they must agree on where everything is."""
    below.check_integrity()
    below.close(LIMIT_SECONDS)
    after = start(folder, below.manager.num_slots)
    assert after.index.reason == ""
    assert after.manager.readable_slots() == below.manager.readable_slots()
    after.check_integrity()
    return after


def test_a_restart_finds_no_key_where_another_could_not_be_written(tmp_path):
    below = start(tmp_path)
    end(below, begin(below, b"a", b"b", b"c", b"d"))
    end(below, begin(below, b"e", b"f"), ok=False)  # in the place of c and d
    assert below.manager.slots_in_use == 2
    end(below, begin(below, b"c"))  # in the place of d
    restart(below, tmp_path).close(LIMIT_SECONDS)


def test_a_restart_finds_a_key_once_that_was_written_again_while_its_place_is(tmp_path):
    below = start(tmp_path)
    end(below, begin(below, b"a", b"b", b"c", b"d"))
    begin(below, b"e")  # in the place of d; the process ends before this has ended
    end(below, begin(below, b"d"))
    restart(below, tmp_path).close(LIMIT_SECONDS)


def test_a_place_that_cannot_be_written_is_used_again_after_a_restart_at_the_soonest(tmp_path):
    below = start(tmp_path, 200)
    move = begin(below, b"a", b"b", b"c")
    below.end_write(move, fail(move, 1))
    bad = int(move.tier_slots[1])
    assert (aside(below), below.gauges()["tier_slots_in_use"]) == (1, 2)
    for first in range(0, 600, 50):
        more = begin(below, *(b"%d" % key for key in range(first, first + 50)))
        assert bad not in more.tier_slots
        end(below, more)
        assert aside(below) == 1
    assert below.gauges()["tier_slots_in_use"] == 199
    assert below.forget_all()
    assert not below.forget_all(), "a place that is set aside holds nothing"
    assert aside(below) == 1
    below.close(LIMIT_SECONDS)
    after = start(tmp_path, 200)
    assert bad in begin(after, *(b"%d" % key for key in range(200))).tier_slots
    after.close(LIMIT_SECONDS)


def test_a_place_that_cannot_be_read_is_not_written_again(tmp_path):
    below = start(tmp_path, 100)
    end(below, begin(below, b"a", b"b"))
    keys = [b"a", b"b"]
    both = [copy(Kind.PROMOTE, keys, below.begin_read(keys))] * 2
    below.begin_read(keys)  # once more, since host memory was emptied
    for move in both:
        below.end_read(move, fail(move, 0))
        assert aside(below) == 1
    assert below.readable(keys).tolist() == [False, True]
    assert both[0].tier_slots[0] not in begin(below, b"a").tier_slots
    restart(below, tmp_path).close(LIMIT_SECONDS)


def test_a_place_with_another_block_is_used_again(tmp_path):
    below = start(tmp_path, 100)
    end(below, begin(below, b"a"))
    move = copy(Kind.PROMOTE, [b"a"], below.begin_read([b"a"]))
    below.end_read(move, np.ones(1, bool))
    assert aside(below) == 0
    assert begin(below, b"b").tier_slots.tolist() == move.tier_slots.tolist()
    below.close(LIMIT_SECONDS)


def test_a_bad_region_as_large_as_a_job_fails_one_write(tmp_path):
    """Else the next job would have just these places again, and so each one after it."""
    below = start(tmp_path, 400)
    move = begin(below, b"a", b"b", b"c")
    below.end_write(move, fail(move))
    assert aside(below) == 3
    assert not {*begin(below, b"d", b"e", b"f").tier_slots} & {*move.tier_slots}
    below.close(LIMIT_SECONDS)


def test_few_places_are_set_aside_and_the_first_of_them_is_tried_again(tmp_path):
    below = start(tmp_path, 200)
    bad = []
    for key in range(3):
        move = begin(below, b"%d" % key)
        below.end_write(move, fail(move))
        bad += move.tier_slots.tolist()
    assert (aside(below), len({*bad})) == (2, 3)
    assert begin(below, b"a").tier_slots.tolist() == bad[:1]
    below.close(LIMIT_SECONDS)


def test_a_place_is_free_where_a_reset_came_before_its_write_had_failed(tmp_path):
    below = start(tmp_path, 200)
    move = begin(below, b"a")
    below.forget_all()
    below.end_write(move, fail(move))
    assert aside(below) == below.gauges()["tier_slots_in_use"] == 0
    below.close(LIMIT_SECONDS)
