"""A rank's copies between host memory and a tier below it, as the scheduler hears of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kv_offload.messages import MoveJob, Outcome, TierCapacity
from kv_offload.worker.jobs import RankJobs
from kv_offload.worker.moves import Moves
from kv_offload.worker.sharing import ALONE, SharingRanks
from tests.support.manual_tier import ManualTier

NAMES = [b"a", b"b", b"c", b"d", b"e"]
PAIRS = np.array([[0, 7], [1, 4], [2, 3], [3, 0], [4, 1]], np.int32)


class Half:
    """The moves of one rank, over slots of 8 bytes that hold their number."""

    def __init__(self, sharing: SharingRanks = ALONE) -> None:
        self.arena = np.repeat(np.arange(8, dtype=np.uint8)[:, None], 8, axis=1)
        self.tier = ManualTier(Path("tier"), 8, self.arena, {})
        self.jobs = RankJobs(sharing.index, sharing)
        self.moves = Moves(self.jobs)
        self.moves.use("disk", self.tier)  # type: ignore[arg-type]

    def move(self, job_id: int, *, promotes: bool) -> None:
        self.moves.start([MoveJob(job_id, promotes, "disk", PAIRS, NAMES)])
        self.moves.poll()


def test_ranks_that_share_memory_move_a_part_each():
    """Each finds in its own file what it has written there."""
    halves = [Half(SharingRanks(index, 2, lambda value: [value, value])) for index in range(2)]
    for half in halves:
        assert half.moves.capacities() == {"disk": TierCapacity(16, "manual", 2)}
        half.move(0, promotes=False)
    assert [sorted(half.tier.records) for half in halves] == [[0, 2], [0, 1, 3]]
    halves[1].tier.faults["mismatch"] = 2
    for half in halves:
        half.arena[:] = 99
        half.move(1, promotes=True)
    assert halves[0].arena[:5, 0].tolist() == [99, 1, 99, 3, 99]
    assert halves[0].jobs.failed_rows == {}
    assert halves[1].jobs.failed_rows == {1: (0, 2)}
    assert halves[1].jobs.ended[1] is Outcome.OK, "a miss is no failure of the tier"
    assert halves[1].arena[4, 0] == 4


def test_a_rank_without_a_part_has_ended_its_part():
    half = Half(SharingRanks(0, 9, lambda value: [value] * 9))
    half.moves.start([MoveJob(0, True, "disk", PAIRS[:1], NAMES[:1])])
    assert half.jobs.ended == {0: Outcome.OK}


def test_an_error_fails_the_job_and_its_rows(caplog):
    half = Half()
    half.tier.faults["error"] = 1
    half.move(0, promotes=False)
    assert half.jobs.ended == {0: Outcome.FAILED}
    assert half.jobs.failed_rows == {0: (0,)}
    assert half.jobs.stats.data["tier_errors"] == 1
    assert "injected fault" in caplog.text


def test_a_move_that_is_refused_has_failed(caplog):
    half = Half()
    half.tier.faults["submit"] = 1
    half.move(0, promotes=True)
    assert half.jobs.ended == {0: Outcome.FAILED}
    assert "refused" in caplog.text


def test_only_long_reads_tell_how_fast_the_tier_is(monkeypatch):
    half = Half()
    half.move(0, promotes=False)
    half.move(1, promotes=True)
    assert half.jobs.speeds.take() is None
    monkeypatch.setattr("kv_offload.worker.moves.TIMED_BYTES", 40)
    half.move(2, promotes=True)
    assert half.jobs.speeds.take() == {"disk": pytest.approx(40 / 0.001)}
    assert half.jobs.speeds.take() is None


def test_ranks_that_share_memory_tell_how_fast_they_read_together(monkeypatch):
    monkeypatch.setattr("kv_offload.worker.moves.TIMED_BYTES", 8)
    sharing = [SharingRanks(index, 2, lambda value: [value, value]) for index in range(2)]
    for half, own_bytes in zip(map(Half, sharing), (16, 24), strict=True):
        half.move(0, promotes=False)
        half.move(1, promotes=True)
        assert half.jobs.stats.data["promoted_bytes"] == own_bytes
        assert half.jobs.speeds.take() == {"disk": pytest.approx(2 * own_bytes / 0.001)}
