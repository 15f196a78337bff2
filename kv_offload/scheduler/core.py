"""The owners of the scheduler's state, which its parts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, KeyMaker, PrefixMap
from kv_offload.cache.retention import Retention
from kv_offload.config import OffloadConfig
from kv_offload.engine import BlockPool
from kv_offload.scheduler.events.announcer import Announcer
from kv_offload.scheduler.loads.costs import LoadCosts
from kv_offload.scheduler.loads.lookups import Lookups
from kv_offload.scheduler.observers import CLOSE_SECONDS, Observers, Subscribers
from kv_offload.scheduler.quotas import Quotas
from kv_offload.scheduler.request import Hit, RequestTable, TrackedRequest, never
from kv_offload.scheduler.spans import Spans
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.timing import StepWatch
from kv_offload.scheduler.transfers import TransferTable
from kv_offload.simulation.miss_ratio_curve import MissRatioCurve


@dataclass(frozen=True)
class EngineFacts:
    """Properties of the engine that do not change while it lives.

    - `groups`: its cache groups; `make_key` makes a slot key from a block hash and a group's id.
    - `num_ranks`: workers, each with a part of every block.
    - `loads_overlap`: True if a load can run while the steps under way compute.
    - `is_to_rest`: returns True while the user has paused the engine, and once it ends.
    - `wake`: makes an idle engine look for work, from any thread; None if it cannot be woken.
    """

    groups: Sequence[CacheGroup]
    pool: BlockPool
    make_key: KeyMaker
    num_ranks: int = 1
    loads_overlap: bool = False
    is_to_rest: Callable[[], bool] = never
    wake: Callable[[], None] | None = None


@dataclass(frozen=True)
class SlotFacts:
    """Size of host memory on the smallest rank.

    A slot takes `slot_bytes` there. Its block takes `block_bytes` on the GPU, which is more if
    slots are packed. Speeds of copies are in bytes of blocks.
    """

    num_slots: int
    slot_bytes: int
    block_bytes: int


class Core:
    """The owners. Each part of the scheduler takes this and keeps those that it needs."""

    def __init__(
        self,
        config: OffloadConfig,
        engine: EngineFacts,
        slots: SlotFacts,
        observers: Observers,
        read_gauges: Callable[[], dict[str, float]],
        *,
        has_tier: bool,
    ) -> None:
        self.config, self.engine, self.slots = config, engine, slots
        policy = make_policy(config.eviction_policy, slots.num_slots)
        self.manager = (LastingManager if config.host_pool else CacheManager)(policy)
        self.prefixes = PrefixMap(engine.groups, engine.pool.hash_block_size, engine.make_key)
        self.transfers = TransferTable(self.manager, engine.pool, engine.num_ranks)
        self.statistics = Statistics(self.manager, read_gauges)
        self.requests = RequestTable(self.statistics)
        per_salt = min(config.max_retained_share_per_salt, config.max_share_per_salt)
        shares = config.max_retained_share, per_salt
        self.retention = Retention(self.manager, *shares, self.statistics.count)
        self.watch = StepWatch()
        self.lookups = Lookups(self.prefixes, self.manager)
        mode, queue = config.load_or_recompute, self.transfers.load_queue
        overlaps, block_bytes = engine.loads_overlap, slots.block_bytes
        self.costs = LoadCosts(mode, block_bytes, self.watch, queue, overlaps=overlaps)
        self.announcer: Announcer | None = None
        self.quotas: Quotas | None = None
        self.subscribers = self._make_subscribers(observers, has_tier=has_tier)

    def _make_subscribers(self, observers: Observers, *, has_tier: bool) -> Subscribers:
        to, prefixes, count = Subscribers(), self.prefixes, self.statistics.count
        to.emptied.append(self.lookups.emptied)
        if self.config.max_share_per_salt < 1:
            quotas = self.quotas = Quotas(self.manager, self.config.max_share_per_salt, count)
            to.stores.append(quotas.stores_planned)
            to.tails.append(quotas.stores_planned)
            to.promotions.append(quotas.promoted)
            to.load_end.append(quotas.load_ended)
            to.emptied.append(quotas.owners.clear)
        if observers.describe is not None:
            announcer = self.announcer = Announcer(self.manager, prefixes, observers.describe)
            to.stores.append(announcer.stores_planned)
            to.promotions.append(announcer.promoted)
            to.follow(announcer)
        if observers.report_span is not None:
            spans = Spans(observers.report_span)
            to.lookup.append(spans.asked)
            to.admission.append(spans.admitted)
            to.load_end.append(spans.load_ended)
        if MissRatioCurve.can_estimate(prefixes):
            num_slots = self.slots.num_slots
            estimates = MissRatioCurve(self.config, prefixes, num_slots, count, with_tier=has_tier)
            to.admission.append(partial(_count_in, estimates))
            to.request_end.append(estimates.ended)
            to.emptied.append(estimates.reset)
            to.work.append(lambda idle: estimates.work(idle=idle))
            to.has_work.append(lambda idle: idle and estimates.has_turns)
        if (recorder := observers.recorder) is not None:
            hash_block_tokens = self.engine.pool.hash_block_size
            to.request_end.append(lambda request, _: recorder.record(request, hash_block_tokens))
            to.work.append(lambda _: count("trace_errors", recorder.take_errors()))
            to.close.append(partial(recorder.close, CLOSE_SECONDS))
        return to


def _count_in(
    estimates: MissRatioCurve, tracked: TrackedRequest, hit: Hit | None, loaded_tokens: int
) -> None:
    if hit is not None and hit.decision is not None:
        found_tokens = loaded_tokens + hit.declined_tokens
        estimates.admitted(tracked.request, hit.start_tokens, found_tokens)
