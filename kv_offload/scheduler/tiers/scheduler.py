"""The scheduler's half with a tier below host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kv_offload.engine import StepOutput
from kv_offload.messages import (
    OffloadMetadata,
    OffloadWorkerMetadata,
    TierCapacity,
    WorkerCapacity,
)
from kv_offload.scheduler.jobs import Job, Move
from kv_offload.scheduler.scheduler import OffloadScheduler
from kv_offload.scheduler.tiers.demotions import Demotions
from kv_offload.scheduler.tiers.promotions import Promotions
from kv_offload.scheduler.tiers.tier import Tier

IDLE_SECONDS = 60.0
"""An engine that nobody has asked for so long begins no more writes to a tier."""

GIVE_WAY_SECONDS = 0.0005
"""For how long a step that computes nothing leaves Python to the threads that move and ask.

An engine with nothing to compute steps in a tight loop. It lets go of Python's lock often, but
never long enough for another thread to wake up and take it: a read of 20 ms ended after 4 s."""

CLOSE_SECONDS = 5.0
"""Bound of the wait for the tier's threads at the end."""


class TieredScheduler(OffloadScheduler):
    """Keeps on a tier what was in host memory, and brings it back before it is loaded.

    What a request needs from the tier is read into host memory first: it waits, and is then served
    as if host memory had always had it. So nothing else of the scheduler knows of a tier.
    """

    def __init__(
        self,
        *arguments: Any,
        make_tier: Callable[[], Tier],
        write_rate: float,
        keep_on_reset: bool,
        **more: Any,
    ) -> None:
        """Take what `OffloadScheduler` takes, and what makes the tier.

        `write_rate` bounds the bytes that each rank writes in a second. `keep_on_reset` says that
        the tier still serves after a reset by the user.
        """
        super().__init__(*arguments, **more)
        self._other_sizes.with_tier = True
        host, jobs = self.manager, self._jobs
        self._tier = tier = make_tier()
        self._keep_on_reset = keep_on_reset
        self._demotions = Demotions(host, tier, jobs, self._slot_bytes, write_rate)
        self._promotions = Promotions(
            self._prefixes,
            host,
            tier,
            jobs,
            self._lookups,
            self._choice,
            self._statistics,
            self._slot_bytes,
            self._announcer,
        )
        self._admissions.waits = self._promotions.waits
        self._tiers_of_ranks: dict[int, TierCapacity] = {}
        self._idle_since: float | None = None
        """When the first step was that computes nothing, on the monotonic clock."""
        self._alarm: threading.Timer | None = None
        """Wakes the engine when a pause of writes is over."""

    # -- steps ---------------------------------------------------------------------------------

    def plan_step(self, output: StepOutput) -> OffloadMetadata:
        """Plan a step, with what is written to the tier in it."""
        if not output.num_scheduled_tokens and (
            self._tier.is_asked or self._jobs.oldest_move_sent is not None
        ):
            time.sleep(GIVE_WAY_SECONDS)
        self._tier.next_step(self._jobs.oldest_moves, self._jobs.step_time.seconds)
        if output.num_scheduled_tokens:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        if self._tier.may_write and self._is_patient:
            self._demotions.plan_step(idle=self._idle_since is not None)
        return super().plan_step(output)

    # -- reports -------------------------------------------------------------------------------

    def _end_job(self, job: Job) -> None:
        if isinstance(job, Move):
            self._end_move(job)
            return
        super()._end_job(job)
        self._demotions.offer(job.slots)

    def _end_move(self, move: Move) -> None:
        failed = move.failed
        pause_seconds = self._tier.copied(move)
        part = self._promotions if move.promotes else self._demotions
        part.ended(move, failed)
        if move.promotes:  # a request that did not wait may have wished to retain it
            self._retention.stored(move.slots)
        name = "promoted" if move.promotes else "demoted"
        self._statistics.count(f"{name}_slots", int(len(failed) - failed.sum()))
        self._statistics.count("lost_tier_slots", int(failed.sum()))
        # An engine that rests by then would leave what has come to the next request.
        if pause_seconds and self.wake is not None:
            self._alarm = threading.Timer(pause_seconds, self.wake)
            self._alarm.daemon = True
            self._alarm.start()

    def _learn(self, report: OffloadWorkerMetadata) -> None:
        super()._learn(report)
        told = {rank: news.promote_bytes_per_second for rank, news in report.ranks.items()}
        self._promotions.rate.hear(told)

    # -- between steps -------------------------------------------------------------------------

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping, also for what is to be written to the tier.

        One that pauses or ends leaves that: its user waits until it no longer steps.
        """
        if super().has_pending_work:
            return True
        tier = self._tier
        # While an answer is late nothing is written, but it comes soon, or that it does not.
        begins = (tier.may_write or tier.is_asked) and self._demotions.has_more and self._is_patient
        # Also after an error: the others that are under way end, and are to be heard of.
        ends = self._jobs.oldest_move_sent is not None and not tier.is_stuck
        return (begins or ends) and not self.is_to_rest()

    @property
    def _is_patient(self) -> bool:
        """Whether writes are begun: an idle engine would go on stepping until all is written."""
        since = self._idle_since
        return since is None or time.monotonic() - since < IDLE_SECONDS

    def _forget_all(self, *, weights_changed: bool) -> bool:
        held = super()._forget_all(weights_changed=weights_changed)
        if weights_changed or not self._keep_on_reset:
            held |= self._tier.forget_all()
        return held

    @property
    def is_settled(self) -> bool:
        """See `OffloadScheduler`."""
        return self._tier.is_settled

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        """See `OffloadScheduler`."""
        return self._tier.settle(problems, timeout_seconds)

    def take_capacities(self, capacities: Sequence[WorkerCapacity]) -> None:
        """Hear what ranks hold; once all have told, open the tier."""
        super().take_capacities(capacities)
        told = {rank.rank: rank.tier for rank in capacities if rank.tier is not None}
        self._tiers_of_ranks |= told
        if len(self._tiers_of_ranks) == self._num_ranks:
            self._tier.open(self._tiers_of_ranks)
            # Ranks that could share memory may not be able to.
            sharing = (rank.sharing_ranks for rank in self._tiers_of_ranks.values())
            self._demotions.sharing_ranks = min(sharing)

    def close(self) -> None:
        """End what the tier runs beside the engine."""
        super().close()
        if self._alarm is not None:
            self._alarm.cancel()
        self._tier.close(CLOSE_SECONDS)

    # -- figures -------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return what the gauges of `kv_offload.metrics` are now, those of the tier too."""
        sent = self._jobs.oldest_move_sent
        tier = self._tier
        return {
            **super().gauges(),
            **tier.gauges(),
            "tier_usable": float(tier.may_read),
            "promoting_slots": self._promotions.running_slots,
            "demoting_slots": self._demotions.running_slots,
            "oldest_move_seconds": 0.0 if sent is None else time.monotonic() - sent,
            "promote_bytes_per_second": self._promotions.rate.measured_bytes_per_second or 0.0,
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself; tests call it each step."""
        super().check_integrity()
        self._tier.check_integrity()
        self._promotions.check_integrity()
