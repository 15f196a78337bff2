"""What a rank copies from the arenas of peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kv_swap.tiers.engine import TierCompletion, TierDirection, TierJob

from kv_offload.cache.peers import Claim, PeerDirectory
from kv_offload.worker.peers import PeerEngine
from tests.kv_offload.cache.test_peers import KEYS, OWN, SLOTS, make_seat
from tests.kv_offload.cache.test_pool_killed import NUM_SLOTS, WORDS, content_of


def copy(pool: Path, keys: Sequence[bytes]) -> tuple[TierCompletion, np.ndarray]:
    """Copy keys into the slots of a new arena, the last one first; return how that ended."""
    arena = np.zeros((NUM_SLOTS, WORDS * 8), np.uint8)
    slots = np.arange(len(keys), dtype=np.int32)
    with PeerEngine(pool / OWN, 0, arena) as tier:
        pairs = np.stack((NUM_SLOTS - 1 - slots, slots), axis=1)
        tier.submit(TierJob(1, TierDirection.PROMOTE, pairs, keys))
        assert tier.wait(60)
        (done,) = tier.poll()
    return done, arena.view(np.uint64)[::-1][: len(keys)]


def test_each_block_comes_from_a_peer_that_has_it(tmp_path: Path) -> None:
    first, words = make_seat(tmp_path)
    make_seat(tmp_path, "seat-1")
    first.withdraw(SLOTS[:1])
    words[5] = content_of(KEYS[5])
    first.publish(SLOTS[:1] + 5, KEYS[5:6])
    keys = [KEYS[0], KEYS[5], KEYS[9], KEYS[2]]
    done, copied = copy(tmp_path, keys)
    assert (done.failed, done.mismatches, done.error) == ((2,), 0, None)
    assert done.nbytes == 3 * WORDS * 8
    for row in (0, 1, 3):
        assert copied[row].tolist() == content_of(keys[row]).tolist()


def test_a_slot_that_its_owner_gives_up_during_the_copy_brings_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = make_seat(tmp_path)
    claim = PeerDirectory.claim

    def claim_just_before(self: PeerDirectory, keys: Sequence[bytes]) -> Claim:
        claimed = claim(self, keys)
        if 1 in claimed.slots:
            directory.withdraw(SLOTS[1:2])
        return claimed

    monkeypatch.setattr(PeerDirectory, "claim", claim_just_before)
    done, _ = copy(tmp_path, KEYS[:3])
    assert (done.failed, done.mismatches, done.error) == ((1,), 0, None)


def test_a_peer_that_started_just_now_is_found(tmp_path: Path) -> None:
    """The scheduler may have found it before this rank has looked for others again."""
    arena = np.zeros((NUM_SLOTS, WORDS * 8), np.uint8)
    with PeerEngine(tmp_path / OWN, 0, arena) as tier:
        make_seat(tmp_path)
        tier.submit(TierJob(1, TierDirection.PROMOTE, np.array([[0, 0]], np.int32), KEYS[:1]))
        assert tier.wait(60)
        assert tier.poll()[0].failed == ()
