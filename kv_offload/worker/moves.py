"""A rank's copies between host memory and the tiers below it.

They run on threads of each tier. A demotion reads slots that the scheduler protects from eviction;
a promotion fills slots that are not announced until all ranks have finished it. So neither needs to
be ordered with copies to and from the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from kv_swap.tiers.engine import TierCompletion, TierDirection, TierEngine, TierJob

from kv_offload.messages import MoveJob, Outcome, TierCapacity
from kv_offload.worker.jobs import RankJobs

TIMED_BYTES = 1 << 18
"""Minimum bytes of a promotion that shows a tier's speed; smaller ones show its latency."""


class Moves:
    """Starts moves and processes their ends. Ranks that share memory move separate slots.

    The slot of the tier alone determines the rank, so that a rank finds its own writes.
    """

    def __init__(self, jobs: RankJobs) -> None:
        self._jobs = jobs
        self._tiers: dict[str, TierEngine] = {}
        # By job: the rows of this rank's slots among all pairs of the job.
        self._rows: dict[int, list[int]] = {}

    def use(self, name: str, tier: TierEngine) -> None:
        """Add a tier."""
        self._tiers[name] = tier

    def capacities(self) -> dict[str, TierCapacity]:
        """Return the capacity of each tier of this rank, counted in slots of all sharing ranks."""
        count = self._jobs.sharing.count
        return {
            name: TierCapacity(tier.num_slots * count, tier.file_id, count)
            for name, tier in self._tiers.items()
        }

    def start(self, moves: Iterable[MoveJob]) -> None:
        """Start moves; moves without a part for this rank have ended."""
        for move in moves:
            try:
                self._start(move)
            except Exception as error:  # noqa: BLE001 - any error fails only this job
                self._jobs.log.error("%s", error)
                self._jobs.end(move.job_id, Outcome.FAILED)

    def _start(self, move: MoveJob) -> None:
        sharing = self._jobs.sharing
        own = np.flatnonzero(move.pairs[:, 1] % sharing.count == sharing.index)
        if not len(own):
            self._jobs.end(move.job_id, Outcome.OK)
            return
        pairs = move.pairs[own]
        pairs[:, 1] //= sharing.count
        rows = own.tolist()
        direction = TierDirection.PROMOTE if move.promotes else TierDirection.DEMOTE
        names = [move.names[row] for row in rows]
        self._tiers[move.tier].submit(TierJob(move.job_id, direction, pairs, names))
        self._rows[move.job_id] = rows

    def poll(self) -> None:
        """Process the moves that ended since the last call. Never waits."""
        for name, tier in self._tiers.items():
            for done in tier.poll():
                try:
                    self._ended(name, done)
                except Exception:  # noqa: BLE001 - later moves in the list have ended, too
                    self._jobs.not_taken_in(done.job_id)

    def _ended(self, tier: str, done: TierCompletion) -> None:
        rows = self._rows.pop(done.job_id)
        failed = tuple(rows[row] for row in done.failed)
        if done.error is not None:
            self._jobs.log.error("%s", done.error)
        # A block that does not match its name is a miss; the tier itself has not failed.
        outcome = Outcome.OK if done.error is None else Outcome.FAILED
        self._jobs.end(done.job_id, outcome, failed)
        promotes = done.direction is TierDirection.PROMOTE
        name = "promoted" if promotes else "demoted"
        self._jobs.stats.count(f"{name}_bytes", done.nbytes)
        self._jobs.stats.count(f"{name}_seconds", done.seconds)
        self._jobs.stats.count(f"{tier}_{'read' if promotes else 'written'}_bytes", done.nbytes)
        self._jobs.stats.count("tier_mismatches", done.mismatches)
        self._jobs.stats.count("tier_errors", done.error is not None)
        if promotes and done.nbytes >= TIMED_BYTES:
            # Sharing ranks each read a part of every job at the same time.
            nbytes = self._jobs.sharing.count * done.nbytes
            self._jobs.speeds.measured(tier, nbytes / done.seconds)

    def revoke_tiers(self, timeout_seconds: float) -> str:
        """See `TierEngine.revoke`. Blocks. Returns the problems of all tiers, or ""."""
        deadline = time.monotonic() + timeout_seconds
        problems = [
            tier.revoke(max(0.0, deadline - time.monotonic())) for tier in self._tiers.values()
        ]
        return "; ".join(filter(None, problems))

    def close(self, timeout_seconds: float) -> None:
        """Close the tiers; a copy that hangs is left alone."""
        deadline = time.monotonic() + timeout_seconds
        for tier in self._tiers.values():
            tier.close(max(0.0, deadline - time.monotonic()))
