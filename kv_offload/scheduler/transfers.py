"""Every copy on its way: one record each, from its plan until all ranks have ended it.

A store copies GPU blocks to slots of host memory, a load copies slots to blocks. A promotion fills
slots of host memory from a lower tier, a demotion writes slots to one.

A store pins its blocks in the engine's block pool: the reference keeps the pool from giving a block
to another request, which would zero or overwrite it under the copy. A load holds its slots against
eviction. Its blocks belong to its request, even after an abort: the engine keeps them until the
load has ended.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slots import NO_SLOTS, Mask, Slots
from kv_offload.engine import BlockPool
from kv_offload.messages import (
    LoadJob,
    MoveJob,
    OffloadMetadata,
    Outcome,
    Pairs,
    RankReport,
    StoreJob,
)
from kv_offload.scheduler.request import StoreCursor, TrackedRequest
from kv_offload.scheduler.timing import LoadQueue, StepTime

if TYPE_CHECKING:
    from kv_offload.tiers.base import Tier


class Kind(enum.Enum):
    """The direction of a transfer."""

    STORE = "store"  # GPU blocks to host memory
    LOAD = "load"  # host memory to GPU blocks
    PROMOTE = "promote"  # a lower tier to host memory
    DEMOTE = "demote"  # host memory to a lower tier


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy. `slots` are its slots of host memory, shape `(n,)`, which it holds until its end.

    - Stores and loads: `blocks`, the GPU blocks, in the order of `slots`. A load without slots is
      incomplete: host memory lost a block that its request counts on, and the load fails.
    - Loads: `request`, its `cursor` when the load was planned, and whether the forward of the same
      step waits for it (`synchronous`). `whole` is explained in `LoadJob`.
    - Promotions and demotions: the name of their `tier`, `keys`, `tier_slots` and the tier's
      `generation` at the plan.
    """

    transfer_id: int
    kind: Kind
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    blocks: list[int] = field(default_factory=list)

    request: TrackedRequest | None = None
    cursor: StoreCursor | None = None
    synchronous: bool = False
    whole: bool = False

    tier: str = ""
    keys: list[bytes] = field(default_factory=list)
    tier_slots: Slots = field(default_factory=lambda: NO_SLOTS)
    generation: bytes = b""

    sent: float = 0.0
    """When a step sent it, on the monotonic clock in seconds."""
    sent_after: float = 0.0
    """The same on the clock of `StepTime`."""
    ranks_left: set[int] = field(default_factory=set)
    outcome: Outcome = Outcome.OK
    """The worst outcome that any rank has reported."""
    has_ended: bool = False
    """True once all ranks have ended it."""
    failed_rows: set[int] = field(default_factory=set)
    """Positions in `slots` whose copy failed on some rank."""
    unpinned_early: bool = False
    """True for a store whose blocks were released while some rank was still copying."""

    @property
    def pins(self) -> bool:
        """True while it is a store that pins its blocks."""
        return self.kind is Kind.STORE and not self.unpinned_early

    @property
    def failed(self) -> Mask:
        """Mask over `slots`: True where the copy failed on some rank."""
        failed = np.zeros(len(self.slots), bool)
        failed[list(self.failed_rows)] = True
        return failed


class Ended(NamedTuple):
    """Transfers that all ranks have ended, and loads that a forward read before they had ended."""

    transfers: list[Transfer]
    lost_loads: list[Transfer]


class TransferTable:
    """All transfers. Each gets the next id when it is planned, and `seal` sends it."""

    def __init__(self, manager: CacheManager, pool: BlockPool, num_ranks: int) -> None:
        self._manager = manager
        self._pool = pool
        self._ranks = frozenset(range(num_ranks))
        self.load_queue = LoadQueue()
        self.step_time = StepTime()
        self.next_id = 0
        self._planned: list[Transfer] = []
        self._planned_loads = 0
        # The store of this step, which is among the planned ones, and its slots in parts.
        self._store: Transfer | None = None
        self._store_slots: list[Slots] = []
        # Sent and not ended on all ranks: by kind, tier and id, in the order of their plans.
        self._running: defaultdict[tuple[Kind, str], dict[int, Transfer]] = defaultdict(dict)
        self._acknowledged: set[int] = set()
        self.pinned_blocks = 0
        """Number of block references that planned and running stores hold."""

    # -- plans ---------------------------------------------------------------------------------

    def _plan(self, kind: Kind) -> Transfer:
        transfer = Transfer(self.next_id, kind)
        self.next_id += 1
        self._planned.append(transfer)
        return transfer

    def plan_store(self, slots: Slots, blocks: list[int]) -> None:
        """Plan to store each block into its slot, and pin the blocks. A step has one store."""
        if self._store is None:
            self._store = self._plan(Kind.STORE)
        self._store_slots.append(slots)
        self._store.blocks += blocks
        pool_blocks = self._pool.blocks
        self._pool.touch([pool_blocks[block] for block in blocks])
        self.pinned_blocks += len(blocks)

    def plan_load(
        self,
        request: TrackedRequest,
        blocks: list[int],
        slots: Slots,
        *,
        synchronous: bool,
        whole: bool = False,
    ) -> None:
        """Plan to load `slots`, which the caller holds, into blocks of a request."""
        load = self._plan(Kind.LOAD)
        load.blocks, load.slots = blocks, slots
        load.request, load.cursor = request, request.cursor
        load.synchronous, load.whole = synchronous, whole
        self._planned_loads += 1
        self.load_queue.add(len(slots), time.monotonic())

    def plan_tier_copy(
        self,
        kind: Kind,
        tier: Tier,
        keys: list[bytes],
        slots: Slots,
        tier_slots: Slots,
        *,
        max_slots: int,
    ) -> list[Transfer]:
        """Plan promotions or demotions of at most `max_slots` each, and return them.

        The caller holds `slots` of host memory and `tier_slots` in both managers.
        """
        transfers = []
        for first in range(0, len(keys), max_slots):
            part = slice(first, first + max_slots)
            transfer = self._plan(kind)
            transfer.tier, transfer.generation = tier.name, tier.generation
            transfer.keys = keys[part]
            transfer.slots, transfer.tier_slots = slots[part], tier_slots[part]
            transfers.append(transfer)
        return transfers

    def seal(self, admissions: int) -> OffloadMetadata:
        """Return the planned transfers, now sent, as a step's plan with `admissions`."""
        if self._store is not None:
            parts = self._store_slots
            self._store.slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self._store, self._store_slots = None, []
        planned, self._planned = self._planned, []
        self._planned_loads = 0
        acknowledged, self._acknowledged = tuple(self._acknowledged), set()
        now, stores, loads, moves = time.monotonic(), [], [], []
        for transfer in planned:
            transfer.sent, transfer.sent_after = now, self.step_time.seconds
            transfer.ranks_left = set(self._ranks)
            self._running[transfer.kind, transfer.tier][transfer.transfer_id] = transfer
            if transfer.kind is Kind.STORE:
                stores.append(StoreJob(transfer.transfer_id, _pairs(transfer)))
            elif transfer.kind is Kind.LOAD:
                loads.append(_load_job(transfer))
            else:
                moves.append(_move_job(transfer))
        return OffloadMetadata(
            tuple(stores), tuple(loads), self.next_id, acknowledged, admissions, tuple(moves)
        )

    # -- ends ----------------------------------------------------------------------------------

    def apply_reports(self, ranks: Mapping[int, RankReport]) -> Ended:
        """Apply reports of ranks. Applying a report twice changes nothing.

        A rank that reports a failed transfer without failed rows has copied none of it.
        """
        ended = Ended([], [])
        for rank, report in ranks.items():
            for transfer_id, outcome in report.jobs.items():
                transfer = self._find(transfer_id)
                if transfer is None:
                    self._acknowledged.add(transfer_id)
                    continue
                rows = report.failed_rows.get(transfer_id, ())
                partly = outcome is Outcome.OK or len(rows)
                transfer.failed_rows.update(rows if partly else range(len(transfer.slots)))
                if outcome is Outcome.LOST and transfer.outcome is not Outcome.LOST:
                    ended.lost_loads.append(transfer)
                transfer.outcome = max(transfer.outcome, outcome)
                transfer.ranks_left.discard(rank)
                if not transfer.ranks_left:
                    transfer.has_ended = True
                    del self._running[transfer.kind, transfer.tier][transfer_id]
                    self._acknowledged.add(transfer_id)
                    ended.transfers.append(transfer)
        return ended

    def _find(self, transfer_id: int) -> Transfer | None:
        for running in self._running.values():
            if transfer_id in running:
                return running[transfer_id]
        return None

    def end_load(self, load: Transfer) -> None:
        """Unpin the slots of a load that all ranks have ended."""
        self.load_queue.remove(len(load.slots), time.monotonic())
        self._manager.complete_load(load.slots)

    def end_store(self, store: Transfer) -> None:
        """Unpin the blocks of a store that all ranks have ended.

        Its slots become readable where every rank copied them, and free otherwise.
        """
        if store.pins:
            self._unpin(store)
        ok = store.outcome is Outcome.OK
        if ok and store.failed_rows:
            failed = store.failed
            self._manager.complete_store(store.slots[failed], ok=False)
            self._manager.complete_store(store.slots[~failed])
        else:
            self._manager.complete_store(store.slots, ok=ok)

    def invalidate_pending_stores(self, ended: Iterable[Transfer] = ()) -> None:
        """Keep pinned stores, and those just `ended`, from becoming readable: their KV is wrong."""
        for transfer in (*self._pinning(), *ended):
            if transfer.kind is Kind.STORE:
                transfer.outcome = Outcome.FAILED

    def give_up_stores(self, sent_before: float = math.inf) -> int:
        """Unpin running stores that were sent before this time of `step_time`; return how many.

        They fail, since they may copy garbage from now on. Their slots stay taken until all ranks
        have reported the end of the copy.
        """
        late = [store for store in self.running(Kind.STORE).values() if store.pins]
        late = [store for store in late if store.sent_after < sent_before]
        for store in late:
            store.outcome = Outcome.FAILED
            self._unpin(store)
            store.unpinned_early = True
        return len(late)

    def _unpin(self, store: Transfer) -> None:
        # The pool reuses the last freed block last, and the head of a prefix should leave last.
        pool_blocks = self._pool.blocks
        self._pool.free_blocks([pool_blocks[block] for block in reversed(store.blocks)])
        self.pinned_blocks -= len(store.blocks)

    # -- queries -------------------------------------------------------------------------------

    def running(self, kind: Kind, tier: str = "") -> Mapping[int, Transfer]:
        """Return the transfers of a kind, and tier, that some rank has not ended, oldest first."""
        return self._running[kind, tier]

    @property
    def any_running(self) -> bool:
        """True while some rank has not ended a transfer that was sent."""
        return any(self._running.values())

    def oldest_age_seconds(self, *kinds: Kind) -> float:
        """Return how long the oldest running transfer of these kinds has run; 0 without one."""
        lanes = [running for (kind, _), running in self._running.items() if kind in kinds]
        first = [next(iter(running.values())) for running in lanes if running]
        return time.monotonic() - min(one.sent for one in first) if first else 0.0

    @property
    def num_loads(self) -> int:
        """Loads that were planned and that some rank has not ended."""
        return self._planned_loads + len(self.running(Kind.LOAD))

    @property
    def plans_synchronous_load(self) -> bool:
        """True if the next `seal` sends a synchronous load."""
        return any(transfer.synchronous for transfer in self._planned)

    def plans_load_of(self, request: TrackedRequest) -> bool:
        """Return whether the next `seal` sends a load of this request."""
        return any(transfer.request is request for transfer in self._planned)

    def pinned(self) -> Iterator[int]:
        """Yield every pinned block, once for each of its pins."""
        for store in self._pinning():
            yield from store.blocks

    def _pinning(self) -> Iterator[Transfer]:
        """Yield the stores that pin blocks, planned or running."""
        if self._store is not None:
            yield self._store
        yield from (store for store in self.running(Kind.STORE).values() if store.pins)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a pin has no reference on its block, or a count is wrong."""
        assert self._planned_loads == sum(one.kind is Kind.LOAD for one in self._planned)
        pins = Counter(self.pinned())
        assert self.pinned_blocks == pins.total()
        for block, count in pins.items():
            assert self._pool.blocks[block].ref_cnt >= count
        for (kind, tier), running in self._running.items():
            for transfer_id, transfer in running.items():
                assert (transfer.kind, transfer.tier) == (kind, tier)
                assert transfer.transfer_id == transfer_id
                assert transfer.ranks_left, "a transfer has ended and is still in the table"
        assert (self._store in self._planned) == (self._store is not None)


def _pairs(transfer: Transfer) -> Pairs:
    """Return the rows `(block, slot)` of a store or load."""
    pairs = np.empty((len(transfer.blocks), 2), np.int32)
    pairs[:, 0] = transfer.blocks
    pairs[:, 1] = transfer.slots if len(transfer.slots) == len(transfer.blocks) else 0
    return pairs


def _load_job(load: Transfer) -> LoadJob:
    assert load.request is not None
    return LoadJob(
        load.transfer_id,
        load.request.request_id,
        _pairs(load),
        incomplete=len(load.slots) < len(load.blocks),
        synchronous=load.synchronous,
        whole=load.whole,
    )


def _move_job(move: Transfer) -> MoveJob:
    pairs = np.stack((move.slots, move.tier_slots), axis=1)
    names = [move.generation + key for key in move.keys]
    return MoveJob(move.transfer_id, move.kind is Kind.PROMOTE, move.tier, pairs, names)
