"""The tiers below host memory, as the scheduler sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_offload.messages import TierCapacity, WorkerCapacity
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.quotas import Quotas
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.base import Tier
from kv_offload.tiers.demoter import Demoter
from kv_offload.tiers.prefetcher import Prefetcher
from kv_offload.tiers.promoter import Promoter

IDLE_SECONDS = 60.0
"""An engine that has had no request for this long starts no more writes to a tier."""

GIVE_WAY_SECONDS = 0.0005
"""How long a step that computes nothing yields Python's lock to the threads of the tiers.

An engine with nothing to compute steps in a tight loop. It releases the lock often, but never long
enough for another thread to wake up and take it: a read of 20 ms ended after 4 s."""

CLOSE_SECONDS = 5.0
"""Maximum wait for the threads of a tier at shutdown."""

TIER_KINDS = Kind.PROMOTE, Kind.DEMOTE


@dataclass(frozen=True)
class TierSpec:
    """The configuration of a tier.

    Each rank writes at most `write_rate` bytes per second. With `keep_on_reset` the tier keeps its
    blocks when the user resets the prefix cache.
    """

    make: Callable[[], Tier]
    write_rate: float
    keep_on_reset: bool


class LowerTiers:
    """Promotes and demotes blocks between host memory and lower tiers, ordered fastest first.

    A request that needs blocks from a tier waits until they are in host memory, and is then served
    as if they had always been there. No other part of the scheduler knows about tiers.

    A disk gets the blocks of host memory that the policy finds worth it, a remote store all that it
    lacks. A block is read from the first tier that has it, so one that came from a remote store is
    written to the disk once a request has loaded it.
    """

    def __init__(self, core: Core, specs: Sequence[TierSpec]) -> None:
        self._engine, self._transfers = core.engine, core.transfers
        self._statistics, self._retention = core.statistics, core.retention
        self.tiers: dict[str, Tier] = {}
        self.demoters: dict[str, Demoter] = {}
        self._quotas: dict[str, Quotas] = {}
        self._kept_on_reset: set[str] = set()
        to = core.subscribers
        for spec in specs:
            tier = spec.make()
            self.tiers[tier.name] = tier
            core.watch.copy_rates[tier.name] = tier.rate
            self.demoters[tier.name] = Demoter(core, tier, spec.write_rate)
            if (manager := tier.manager) is not None:
                if core.announcer is not None:
                    announcer = core.announcer.below(manager, tier.name)
                    to.demotions.append(partial(announcer.demoted, core.announcer))
                    to.follow(announcer)
                if core.quotas is not None:
                    share, count = core.config.max_share_per_salt, core.statistics.count
                    quotas = Quotas(manager, share, count, tier.name, tier.evict)
                    self._quotas[tier.name] = quotas
                    to.demotions.append(partial(quotas.demoted, core.quotas))
                    to.promotions.append(quotas.promoted)
            if spec.keep_on_reset:
                self._kept_on_reset.add(tier.name)
        self.promoter = Promoter(core, self.tiers)
        self._prefetcher = Prefetcher(core, self.promoter)
        # By tier and rank.
        self._ranks: dict[str, dict[int, TierCapacity]] = {name: {} for name in self.tiers}
        # Time of the first step without tokens after the last one with tokens; monotonic clock.
        self._idle_since: float | None = None
        # By tier, the timer that wakes the engine after a write pause.
        self._alarms: dict[str, threading.Timer] = {}

    def arrived(self, request: TrackedRequest) -> None:
        """Prefetch a request's blocks into host memory while it is queued."""
        self._prefetcher.arrived(request)

    def waits(self, request: TrackedRequest, start_tokens: int) -> bool:
        """See `Promoter.waits`."""
        return bool(self.tiers) and self.promoter.waits(request, start_tokens)

    def advance(self, *, computes: bool) -> None:
        """Plan the demotions and prefetches of a step; `computes` if it computes any tokens."""
        if not self.tiers:
            return
        if not computes and any(
            tier.is_asked or self._copies(tier) for tier in self.tiers.values()
        ):
            time.sleep(GIVE_WAY_SECONDS)
        if computes:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        for name, tier in self.tiers.items():
            tier.next_step(self._copies(tier), self._transfers.step_time.seconds)
            if tier.may_write and self._is_patient:
                idle = self._idle_since is not None
                self.demoters[name].plan_step(idle=idle, sharing_ranks=self._sharing_ranks(name))
        self._prefetcher.plan_step()

    def end(self, transfer: Transfer) -> None:
        """Act on a promotion or demotion that all ranks have ended."""
        failed = transfer.failed
        pause_seconds = self.tiers[transfer.tier].copied(transfer)
        if transfer.kind is Kind.PROMOTE:
            self.promoter.reads.ended(transfer, failed)
            # A request that did not wait for these blocks may have asked to retain them.
            self._retention.stored(transfer.slots)
        else:
            self.demoters[transfer.tier].ended(transfer, failed)
        name = f"{transfer.kind.value}d_slots"
        self._statistics.count(name, int(len(failed) - failed.sum()))
        self._statistics.count("lost_tier_slots", int(failed.sum()))
        # Otherwise an idle engine would write blocks stored meanwhile only at its next request.
        if pause_seconds and self._engine.wake is not None:
            alarm = threading.Timer(pause_seconds, self._engine.wake)
            self._alarms[transfer.tier] = alarm
            alarm.daemon = True
            alarm.start()

    @property
    def has_pending_work(self) -> bool:
        """True while the engine must keep stepping for a tier."""
        # Pausing or ending an engine waits until it stops stepping.
        return any(map(self._has_work, self.tiers.values())) and not self._engine.is_to_rest()

    def _has_work(self, tier: Tier) -> bool:
        # While an answer is late nothing is written, but the answer or its timeout will come soon.
        may_begin = tier.may_write or tier.is_asked
        begins = may_begin and self.demoters[tier.name].has_more and self._is_patient
        # After an error the other copies under way still end, and their ends are applied.
        return begins or (bool(self._copies(tier)) and not tier.is_stuck)

    def _sharing_ranks(self, tier: str) -> int:
        """Return how many ranks, at least, divide the slots to write; sharing can fail on some."""
        return min((rank.sharing_ranks for rank in self._ranks[tier].values()), default=1)

    def _copies(self, tier: Tier) -> list[Transfer]:
        """Return the oldest copies under way from a tier and to it."""
        lanes = [self._transfers.running(kind, tier.name) for kind in TIER_KINDS]
        return [next(iter(lane.values())) for lane in lanes if lane]

    @property
    def _is_patient(self) -> bool:
        """False once the engine has been idle for so long that writes would only keep it awake."""
        since = self._idle_since
        return since is None or time.monotonic() - since < IDLE_SECONDS

    def clear(self, *, weights_changed: bool) -> bool:
        """Drop all blocks unless they may survive this reset; return whether any were dropped."""
        dropped = False
        for name, tier in self.tiers.items():
            if weights_changed or name not in self._kept_on_reset:
                dropped |= tier.forget_all()
                if name in self._quotas:
                    self._quotas[name].owners.clear()
        return dropped

    @property
    def is_settled(self) -> bool:
        """True if all tiers are; see `Tier.is_settled`."""
        return all(tier.is_settled for tier in self.tiers.values())

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        """Settle all tiers; see `Tier.settle`."""
        settled = [tier.settle(problems, timeout_seconds) for tier in self.tiers.values()]
        return all(settled)

    def take_capacities(self, capacities: Sequence[WorkerCapacity]) -> None:
        """Open each tier once every rank has reported its part."""
        for name, tier in self.tiers.items():
            ranks = self._ranks[name]
            ranks |= {rank.rank: rank.tiers[name] for rank in capacities if name in rank.tiers}
            if len(ranks) == self._engine.num_ranks:
                tier.open(ranks)

    def close(self) -> None:
        """Stop the tiers' threads, each within `CLOSE_SECONDS`."""
        for alarm in self._alarms.values():
            alarm.cancel()
        for tier in self.tiers.values():
            tier.close(CLOSE_SECONDS)

    def gauges(self) -> dict[str, float]:
        """Return the tiers' gauges by name; none without a tier."""
        if not self.tiers:
            return {}
        gauges: dict[str, float] = {
            "promoting_slots": self.promoter.reads.running_slots,
            "demoting_slots": sum(one.running_slots for one in self.demoters.values()),
            "oldest_move_seconds": self._transfers.oldest_age_seconds(*TIER_KINDS),
        }
        for name, tier in self.tiers.items():
            gauges |= tier.gauges()
            gauges[f"{name}_usable"] = float(tier.may_read)
            speed = tier.rate.measured_bytes_per_second or 0.0
            gauges[f"{name}_read_bytes_per_second"] = speed
        return gauges

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself."""
        for tier in self.tiers.values():
            tier.check_integrity()
        for quotas in self._quotas.values():
            quotas.owners.check_integrity()
        self.promoter.reads.check_integrity()
        self.promoter.questions.check_integrity()
