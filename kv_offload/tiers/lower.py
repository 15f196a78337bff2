"""The tier below host memory as the scheduler sees it: `NoTier`, or one with a disk or a remote."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_offload.cache.slots import Slots
from kv_offload.messages import OffloadWorkerMetadata, TierCapacity, WorkerCapacity
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.loads.costs import LoadCosts
from kv_offload.scheduler.loads.lookups import Lookups
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.base import Tier
from kv_offload.tiers.demoter import Demoter
from kv_offload.tiers.promoter import Promoter

IDLE_SECONDS = 60.0
"""An engine without requests for this long starts no more writes to a tier."""

GIVE_WAY_SECONDS = 0.0005
"""How long a step that computes nothing gives Python's lock to the tier's threads.

An engine with nothing to compute steps in a tight loop. It releases the lock often, but never long
enough for another thread to wake up and take it: a read of 20 ms ended after 4 s."""

CLOSE_SECONDS = 5.0
"""Bound of the wait for the tier's threads at the end."""

TIER_KINDS = Kind.PROMOTE, Kind.DEMOTE


@dataclass(frozen=True)
class TierSpec:
    """The configuration of a tier. Each rank writes at most `write_rate` bytes per second.

    With `keep_on_reset` the tier still serves after the user has reset the prefix cache.
    """

    make: Callable[[], Tier]
    write_rate: float
    keep_on_reset: bool


class LowerTier(ABC):
    """The interface of the tier to the scheduler.

    A request that needs blocks from the tier waits until they are in host memory, and is then
    served as if they had always been there. No other part of the scheduler knows about the tier.
    """

    @abstractmethod
    def waits(self, request: TrackedRequest, start_tokens: int) -> bool:
        """Return True if a request is to be looked up again later, since a promotion is coming.

        Starts the promotion if it is worth it. `start_tokens` of the request are on the GPU.
        """

    @abstractmethod
    def advance(self, *, computes: bool) -> None:
        """Plan this step's demotions. `computes` is False for a step without tokens."""

    @abstractmethod
    def slots_used(self, slots: Slots) -> None:
        """Consider slots of host memory for a demotion: they were just stored or loaded."""

    @abstractmethod
    def end(self, transfer: Transfer) -> None:
        """Act on a promotion or demotion that all ranks have ended."""

    @abstractmethod
    def learn(self, report: OffloadWorkerMetadata) -> None:
        """Take the speeds that ranks have measured."""

    @property
    @abstractmethod
    def has_pending_work(self) -> bool:
        """True while the engine must keep stepping for the tier."""

    @abstractmethod
    def clear(self, *, weights_changed: bool) -> bool:
        """Drop all blocks unless they may survive this reset; return whether any were dropped."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """See `Tier.is_settled`."""

    @abstractmethod
    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        """See `Tier.settle`."""

    @abstractmethod
    def take_capacities(self, capacities: Sequence[WorkerCapacity]) -> None:
        """Open the tier once every rank has named its part."""

    @abstractmethod
    def close(self) -> None:
        """Stop the tier's threads, within `CLOSE_SECONDS`."""

    @abstractmethod
    def gauges(self) -> dict[str, float]:
        """Return the tier's gauges by name."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself."""


class NoTier(LowerTier):
    """Host memory is the lowest tier."""

    has_pending_work = False
    is_settled = True

    def waits(self, request: TrackedRequest, start_tokens: int) -> bool:
        return False

    def advance(self, *, computes: bool) -> None:
        pass

    def slots_used(self, slots: Slots) -> None:
        pass

    def end(self, transfer: Transfer) -> None:
        raise AssertionError("a promotion or demotion ended without a tier")

    def learn(self, report: OffloadWorkerMetadata) -> None:
        pass

    def clear(self, *, weights_changed: bool) -> bool:
        return False

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        return True

    def take_capacities(self, capacities: Sequence[WorkerCapacity]) -> None:
        pass

    def close(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        return {}

    def check_integrity(self) -> None:
        pass


class ActiveTier(LowerTier):
    """Promotes and demotes between host memory and a disk or remote."""

    def __init__(self, core: Core, lookups: Lookups, costs: LoadCosts, spec: TierSpec) -> None:
        self._engine, self._transfers = core.engine, core.transfers
        self._statistics, self._retention = core.statistics, core.retention
        self._keep_on_reset = spec.keep_on_reset
        self.tier = spec.make()
        self.demoter = Demoter(core, self.tier, spec.write_rate)
        self.promoter = Promoter(core, self.tier, lookups, costs)
        self._ranks: dict[int, TierCapacity] = {}
        # Time of the first of the latest steps without tokens, on the monotonic clock.
        self._idle_since: float | None = None
        # Wakes the engine after a pause of writes.
        self._alarm: threading.Timer | None = None

    def waits(self, request: TrackedRequest, start_tokens: int) -> bool:
        return self.promoter.waits(request, start_tokens)

    def advance(self, *, computes: bool) -> None:
        if not computes and (self.tier.is_asked or self._oldest_copy is not None):
            time.sleep(GIVE_WAY_SECONDS)
        oldest = [self._transfers.oldest(kind) for kind in TIER_KINDS]
        self.tier.next_step(filter(None, oldest), self._transfers.step_time.seconds)
        if computes:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        if self.tier.may_write and self._is_patient:
            idle = self._idle_since is not None
            self.demoter.plan_step(idle=idle, sharing_ranks=self._sharing_ranks)

    def slots_used(self, slots: Slots) -> None:
        self.demoter.offer(slots)

    def end(self, transfer: Transfer) -> None:
        failed = transfer.failed
        pause_seconds = self.tier.copied(transfer)
        if transfer.kind is Kind.PROMOTE:
            self.promoter.ended(transfer, failed)
            # A request that did not wait for them may have asked to retain these blocks.
            self._retention.stored(transfer.slots)
        else:
            self.demoter.ended(transfer, failed)
        name = f"{transfer.kind.value}d_slots"
        self._statistics.count(name, int(len(failed) - failed.sum()))
        self._statistics.count("lost_tier_slots", int(failed.sum()))
        # A resting engine would leave what has come meanwhile until its next request.
        if pause_seconds and self._engine.wake is not None:
            self._alarm = threading.Timer(pause_seconds, self._engine.wake)
            self._alarm.daemon = True
            self._alarm.start()

    def learn(self, report: OffloadWorkerMetadata) -> None:
        speeds = {rank: news.promote_bytes_per_second for rank, news in report.ranks.items()}
        self.promoter.rate.hear(speeds)

    @property
    def has_pending_work(self) -> bool:
        # While an answer is late nothing is written, but the answer or its timeout comes soon.
        may_begin = self.tier.may_write or self.tier.is_asked
        begins = may_begin and self.demoter.has_more and self._is_patient
        # After an error the other copies under way still end, and their ends are applied.
        ends = self._oldest_copy is not None and not self.tier.is_stuck
        # The user of an engine that pauses or ends waits until it stops stepping.
        return (begins or ends) and not self._engine.is_to_rest()

    @property
    def _sharing_ranks(self) -> int:
        """Number of ranks that write each slot once between them; some may have failed to share."""
        return min((rank.sharing_ranks for rank in self._ranks.values()), default=1)

    @property
    def _oldest_copy(self) -> Transfer | None:
        return self._transfers.oldest(*TIER_KINDS)

    @property
    def _is_patient(self) -> bool:
        """False once the engine has idled so long that writes would only keep it awake."""
        since = self._idle_since
        return since is None or time.monotonic() - since < IDLE_SECONDS

    def clear(self, *, weights_changed: bool) -> bool:
        if self._keep_on_reset and not weights_changed:
            return False
        return self.tier.forget_all()

    @property
    def is_settled(self) -> bool:
        return self.tier.is_settled

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        return self.tier.settle(problems, timeout_seconds)

    def take_capacities(self, capacities: Sequence[WorkerCapacity]) -> None:
        self._ranks |= {rank.rank: rank.tier for rank in capacities if rank.tier is not None}
        if len(self._ranks) == self._engine.num_ranks:
            self.tier.open(self._ranks)

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self.tier.close(CLOSE_SECONDS)

    def gauges(self) -> dict[str, float]:
        return {
            **self.tier.gauges(),
            "tier_usable": float(self.tier.may_read),
            "promoting_slots": self.promoter.running_slots,
            "demoting_slots": self.demoter.running_slots,
            "oldest_move_seconds": self._transfers.oldest_age_seconds(*TIER_KINDS),
            "promote_bytes_per_second": self.promoter.rate.measured_bytes_per_second or 0.0,
        }

    def check_integrity(self) -> None:
        self.tier.check_integrity()
        self.promoter.check_integrity()
