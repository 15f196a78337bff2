"""Records looked at in place."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from kv_swap.errors import TierError
from kv_swap.tiers.record import Verdict
from kv_swap.tiers.region import read_description
from kv_swap.tiers.verify import PIECE_BYTES, SlotState, verify

from tests.support.tier_bed import ODD, TierBed, flip, named


def test_says_what_lies_in_each_slot_while_an_engine_uses_the_file(tmp_path):
    path = tmp_path / "file"
    with TierBed(path, slot_bytes=ODD, model="a") as bed:
        bed.put(named(5))
        content = read_description(path)
        assert (content.num_slots, content.slot_bytes) == (8, ODD)
        assert content.description == {"model": "a"}
        flip(path, content.offset(1) + 4096)
        flip(path, content.offset(2) + 60)
        expected = {0: b"block 0", 3: b"block 4"}
        assert list(verify(path, [6, 0, 1, 2, 3, 4], expected)) == [
            SlotState(6, Verdict.EMPTY, b""),
            SlotState(0, Verdict.MATCH, b"block 0"),
            SlotState(1, Verdict.DAMAGED, b"block 1"),
            SlotState(2, Verdict.DAMAGED, b""),
            SlotState(3, Verdict.OTHER, b"block 3"),
            SlotState(4, Verdict.MATCH, b"block 4"),
        ]
        assert bed.get(named(5)).failed == (1, 2)


def test_what_cannot_be_read_is_said_and_the_rest_is_looked_at(tmp_path):
    path = tmp_path / "file"
    with TierBed(path) as bed:
        bed.put(named(8))
    os.truncate(path, read_description(path).offset(4) + 5000)
    verdicts = [state.verdict for state in verify(path, [5, 4, 3])]
    assert verdicts == [Verdict.UNREADABLE, Verdict.UNREADABLE, Verdict.MATCH]


def test_bad_sectors_are_unreadable(failing):
    folder, disk = failing
    with TierBed(folder / "file", 256, slot_bytes=65536 - 4096) as bed:
        bed.put(named(256))
    os.sync()
    os.truncate(disk, 16 << 20)
    with (folder / "file").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    verdicts = {state.verdict for state in verify(folder / "file", range(256), named(256))}
    assert verdicts == {Verdict.MATCH, Verdict.UNREADABLE}


def test_a_large_slot_is_read_in_pieces(tmp_path):
    """A slot of 4 GiB would take as much memory."""
    path = tmp_path / "file"
    with TierBed(path, 2, slot_bytes=2 * PIECE_BYTES + 4096) as bed:
        bed.put(named(2))
    flip(path, read_description(path).offset(2) - 1)
    tracemalloc.start()
    try:
        verdicts = [state.verdict for state in verify(path, [0, 1], named(2))]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert verdicts == [Verdict.MATCH, Verdict.DAMAGED]
    assert most < 1.5 * PIECE_BYTES


def test_what_is_no_file_of_a_tier_is_refused(tmp_path):
    with pytest.raises(TierError, match="No such file or directory"):
        read_description(tmp_path / "gone")
    (tmp_path / "text").write_text("text")
    with pytest.raises(TierError, match="no tier has made it"):
        list(verify(tmp_path / "text", [0]))
    with pytest.raises(TierError, match="cannot read"):
        read_description(tmp_path)
    with TierBed(tmp_path / "file"):
        pass
    with pytest.raises(TierError, match="has no slot 8, valid are 0 to 7"):
        list(verify(tmp_path / "file", [0, 8]))
