"""A disk's slots and the index that a restart finds, beside each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.messages import TierCapacity
from kv_offload.scheduler.jobs import Move
from kv_offload.scheduler.tiers.slot_tier import SlotTier

NUM_SLOTS = 4
LIMIT_SECONDS = 20.0


def start(folder: Path) -> SlotTier:
    below = SlotTier(NUM_SLOTS, partial(DiskIndex, folder / "index.sqlite", {}))
    below.open({0: TierCapacity(NUM_SLOTS, "file")})
    return below


def begin(below: SlotTier, *keys: bytes) -> Move:
    """Begin to write keys that the disk has not."""
    rows, places = below.begin_write(keys)
    assert len(rows) == len(keys)
    return Move([], np.zeros(len(keys), np.int32), keys=[*keys], tier_slots=places)


def end(below: SlotTier, move: Move, *, ok: bool = True) -> None:
    below.end_write(move, np.full(len(move.keys), not ok))


def restart(below: SlotTier, folder: Path) -> SlotTier:
    """End a tier and start the next one; they must agree on where everything is."""
    below.check_integrity()
    below.close(LIMIT_SECONDS)
    after = start(folder)
    assert after.index.reason == ""
    assert after.manager.readable_slots() == below.manager.readable_slots()
    after.check_integrity()
    return after


def test_a_restart_finds_no_key_where_another_could_not_be_written(tmp_path: Path) -> None:
    below = start(tmp_path)
    end(below, begin(below, b"a", b"b", b"c", b"d"))
    end(below, begin(below, b"e", b"f"), ok=False)  # in the place of c and d
    assert below.manager.slots_in_use == 2
    end(below, begin(below, b"c"))  # in the place of d
    restart(below, tmp_path).close(LIMIT_SECONDS)


def test_a_restart_finds_a_key_once_that_was_written_again_while_its_place_is(
    tmp_path: Path,
) -> None:
    below = start(tmp_path)
    end(below, begin(below, b"a", b"b", b"c", b"d"))
    begin(below, b"e")  # in the place of d; the process ends before this has ended
    end(below, begin(below, b"d"))
    restart(below, tmp_path).close(LIMIT_SECONDS)
