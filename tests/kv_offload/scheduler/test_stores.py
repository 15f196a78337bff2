from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import Request

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.messages import JobResult, StoreJob
from kv_offload.metrics import SKIP_REASONS
from kv_offload.scheduler.request import RequestTable, StoreCursor
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.budget import StoreBudget
from kv_offload.scheduler.stores.leftovers import Leftovers
from kv_offload.scheduler.stores.planner import StorePlanner
from tests.support.configurations import make_request

FULL = CacheGroup(0, 4)
RANK_0, RANK_1 = frozenset({0}), frozenset({1})


class Stores:
    """A planner on vLLM's own block pool, and requests whose blocks come from there."""

    def __init__(
        self,
        *groups: CacheGroup,
        blocks: int = 33,
        slots: int = 32,
        ranks: int = 1,
        share: float = 1.0,
        uses: int = 1,
    ) -> None:
        self.groups = groups or (FULL,)
        self.prefixes = PrefixMap(self.groups, 4, make_block_hash_with_group_id)
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=4)
        self.manager = CacheManager(make_policy("lru", slots))
        self.requests = RequestTable()
        self.requests.admitted = 1
        self.budget = StoreBudget(64, share, self.requests, lambda: 0.0)
        self.statistics = Statistics(self.manager, dict)
        self.planner = StorePlanner(
            self.prefixes,
            self.manager,
            self.pool,
            ranks,
            self.budget,
            self.statistics,
            prompt_only=False,
            after_uses=uses,
        )
        self.candidates, self.jobs = self.planner.candidates, self.planner.jobs
        self.leftovers = Leftovers(self.planner, self.statistics)

    def new_request(self, blocks: int, first_token: int = 1) -> Request:
        """Return a request of full blocks; another `first_token` is another prefix."""
        return make_request("a", [first_token, *range(2, 4 * blocks + 1)], 4)

    def allocate(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def know(self, request: Request, ids: Sequence[int], first: int = 0, group: int = 0) -> None:
        """Have the pool learn the hashes of full blocks from `first` on, as a step that runs."""
        self.pool.cache_full_blocks(
            request,
            [self.pool.blocks[block] for block in ids],
            num_cached_blocks=first,
            num_full_blocks=len(ids),
            block_size=self.groups[group].block_tokens,
            kv_cache_group_id=group,
        )

    def compute(self, blocks: int, first_token: int = 1) -> tuple[StoreCursor, list[int]]:
        """Return a request that holds blocks that the pool knows; nothing of it is planned."""
        request = self.new_request(blocks, first_token)
        ids = self.allocate(blocks)
        self.know(request, ids)
        return self.cursor(request, ids), ids

    def compute_groups(self, *blocks: int) -> StoreCursor:
        """Return a request that holds so many blocks in each group, which the pool knows."""
        request = self.new_request(blocks[0])
        ids = [self.allocate(count) for count in blocks]
        for group, group_ids in enumerate(ids):
            self.know(request, group_ids, group=group)
        return self.cursor(request, *ids)

    def free(self, ids: Sequence[int]) -> None:
        """Let a request go, as the engine does: its last block is reused first."""
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(ids)])

    def cursor(self, request: Request, *ids: Sequence[int]) -> StoreCursor:
        """Return the cursor of a request of which nothing has been planned."""
        return StoreCursor(request, [list(group) for group in ids], [0] * len(ids), 1)

    def plan(self, cursor: StoreCursor, end: int = 1000, soon_free: int = 0) -> StoreJob | None:
        """Plan one step, from the cursor on; return its job, if there is one."""
        self.candidates.next_step()
        self.candidates.examine(cursor, end)
        jobs = self.take(soon_free)
        self.check()
        assert len(jobs) < 2
        return jobs[0] if jobs else None

    def plan_anew(self, cursor: StoreCursor, end: int = 1000) -> StoreJob | None:
        """Plan one step of another request that has the same tokens and the same blocks."""
        return self.plan(self.cursor(cursor.request, *cursor.block_ids), end)

    def take(self, soon_free: int = 0) -> tuple[StoreJob, ...]:
        self.planner.pin_chosen(soon_free)
        return self.jobs.take_planned()

    def leftovers_step(self, *, idle: bool = False) -> StoreJob | None:
        """Plan one step without requests."""
        self.candidates.next_step()
        self.leftovers.examine()
        jobs = self.take()
        self.leftovers.settle(idle=idle)
        self.check()
        return jobs[0] if jobs else None

    def end(self, job: StoreJob, ranks: frozenset[int] = RANK_0, *, ok: bool = True) -> None:
        self.planner.complete({job.job_id: JobResult(ranks, ok)})
        self.check()

    def check(self) -> None:
        self.manager.check_integrity()
        assert self.jobs.pinned_blocks == len(list(self.jobs.pinned()))

    def readable(self, cursor: StoreCursor, group: int = 0) -> list[bool]:
        hashes = cursor.request.block_hashes
        keys = self.prefixes.slot_keys(hashes, self.groups[group], 0, len(hashes))
        return self.manager.readable(keys).tolist()

    def references(self, ids: Sequence[int]) -> list[int]:
        return [self.pool.blocks[block].ref_cnt for block in ids]

    def skipped(self) -> dict[str, int]:
        counted = self.statistics.take(idle=True)
        figures = counted.data if counted is not None else {}
        return {
            name.removeprefix("skipped_"): slots
            for name, slots in figures.items()
            if name.startswith("skipped_")
        }


def blocks_of(job: StoreJob | None) -> list[int]:
    assert job is not None
    assert job.pairs.dtype == np.int32
    return job.pairs[:, 0].tolist()


# -- what is planned ---------------------------------------------------------------------------


def test_each_step_continues_where_the_last_one_ended() -> None:
    stores = Stores()
    cursor, ids = stores.compute(8)
    planned = [stores.plan(cursor, end) for end in (3, 4, 11, 11, 12, 27, 32, 32)]
    jobs = [job for job in planned if job]
    expected = [[], ids[:1], ids[1:2], [], ids[2:3], ids[3:6], ids[6:], []]
    assert [blocks_of(job) if job else [] for job in planned] == expected
    assert [job.job_id for job in jobs] == [0, 1, 2, 3, 4]
    assert len({slot for job in jobs for slot in job.pairs[:, 1].tolist()}) == 8


def test_a_block_whose_hash_does_not_exist_yet_waits() -> None:
    """Placeholders of asynchronous scheduling have no tokens, so their blocks have no hash."""
    stores = Stores()
    cursor, ids = stores.compute(2)
    cursor.block_ids[0] += stores.allocate(1)
    assert blocks_of(stores.plan(cursor, 12)) == ids
    cursor.request.append_output_token_ids([1, 2, 3, 4])
    stores.know(cursor.request, cursor.block_ids[0], first=2)
    assert blocks_of(stores.plan(cursor, 12)) == cursor.block_ids[0][2:]
    assert stores.skipped() == {}


def test_every_group_is_planned_in_one_job() -> None:
    stores = Stores(FULL, CacheGroup(1, 8))
    cursor = stores.compute_groups(4, 2)
    job = stores.plan(cursor, 16)
    assert blocks_of(job) == [block for ids in cursor.block_ids for block in ids]
    stores.end(job)
    assert stores.readable(cursor, 0) == [True] * 4
    assert stores.readable(cursor, 1) == [True] * 2


def test_two_requests_of_a_step_share_a_job_and_store_a_prefix_once() -> None:
    stores = Stores()
    cursor, ids = stores.compute(3)
    twin, twin_ids = stores.compute(3)
    other, other_ids = stores.compute(3, first_token=9)
    stores.candidates.next_step()
    for asking in (cursor, twin, other):
        stores.candidates.examine(asking, 12)
    (job,) = stores.take()
    assert blocks_of(job) == [*ids, *other_ids]
    assert stores.references(twin_ids) == [1, 1, 1]
    assert stores.take() == ()


# -- blocks that the pool does not know under that key now -------------------------------------


def test_a_block_that_the_pool_does_not_know_is_not_planned() -> None:
    stores = Stores()
    request, ids = stores.new_request(3), stores.allocate(3)
    stores.know(request, ids[:2])
    assert blocks_of(stores.plan(stores.cursor(request, ids), 12)) == ids[:2]
    assert stores.skipped() == {"moved_on": 1}
    assert stores.skipped() == {}, "reasons are handed out once"


def test_a_block_that_was_given_to_somebody_else_is_not_planned() -> None:
    """The ids that a request remembers go stale, and then name another prefix."""
    stores = Stores(blocks=5)
    cursor, ids = stores.compute(4)
    stores.free(ids)
    other, other_ids = stores.compute(3, first_token=9)
    assert set(other_ids) < set(ids)
    job = stores.plan(cursor, 16)
    assert blocks_of(job) == [block for block in ids if block not in other_ids]
    assert stores.skipped() == {"moved_on": 3}
    stores.end(job)
    assert stores.readable(other) == [False] * 3


def test_a_block_that_was_given_to_another_group_is_not_planned() -> None:
    stores = Stores(FULL, CacheGroup(1, 4))
    request, ids = stores.new_request(2), stores.allocate(2)
    stores.know(request, ids, group=1)
    assert stores.plan(stores.cursor(request, ids, []), 8) is None
    assert stores.skipped() == {"moved_on": 2}


def test_a_freed_block_that_nobody_took_is_planned_and_taken_off_the_free_queue() -> None:
    stores = Stores(blocks=5)
    cursor, ids = stores.compute(4)
    stores.free(ids)
    assert blocks_of(stores.plan(cursor, 16)) == ids
    assert stores.pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="free blocks"):
        stores.pool.get_new_blocks(1)


def test_null_blocks_are_not_planned() -> None:
    """A window group has them for blocks that left the window."""
    stores = Stores(CacheGroup(0, 4, 6))
    cursor, ids = stores.compute(4)
    null = stores.pool.null_block
    references = null.ref_cnt
    cursor.block_ids[0][:2] = [null.block_id] * 2
    assert blocks_of(stores.plan(cursor, 16)) == ids[2:]
    assert null.ref_cnt == references
    assert stores.skipped() == {}, "this request never had them"


@pytest.mark.parametrize(
    ("retention_tokens", "lost"), [(None, 8), (0, 2), (16, 5)], ids=["all", "end", "16"]
)
def test_a_block_that_vllm_does_not_name_is_not_lost(
    retention_tokens: int | None, lost: int
) -> None:
    """A hit of 28 tokens reads slots 5 and 6, one of 16 slots 2, 3, one of 32 slots 6, 7."""
    stores = Stores(CacheGroup(0, 4, 6, retention_tokens=retention_tokens))
    cursor = stores.cursor(stores.new_request(8), stores.allocate(8))
    assert stores.plan(cursor, 32) is None
    assert stores.skipped() == {"moved_on": lost}


# -- pins --------------------------------------------------------------------------------------


def test_planned_blocks_are_referenced_until_the_store_has_ended() -> None:
    stores = Stores()
    cursor, ids = stores.compute(3)
    stores.candidates.examine(cursor, 8)
    stores.planner.pin_chosen()
    assert stores.references(ids) == [2, 2, 1]
    assert (stores.jobs.pending, stores.jobs.running) == (True, 0)
    (job,) = stores.take()
    assert stores.references(ids) == [2, 2, 1]
    assert (stores.jobs.pending, stores.jobs.running) == (True, 1)
    assert stores.jobs.running_jobs() == (job.job_id,)
    stores.end(job)
    assert stores.references(ids) == [1, 1, 1]
    assert (stores.jobs.pending, stores.jobs.running) == (False, 0)
    assert stores.readable(cursor) == [True, True, False]


def test_a_pinned_block_is_not_reallocated_when_its_owner_is_gone() -> None:
    stores = Stores(blocks=6)
    cursor, ids = stores.compute(4)
    job = stores.plan(cursor, 16, soon_free=4)
    stores.free(ids)
    assert stores.pool.get_num_free_blocks() == 1
    assert stores.allocate(1)[0] not in ids
    stores.end(job)
    assert sorted(stores.allocate(4)) == sorted(ids)


def test_unpinned_blocks_leave_tail_first_and_after_all_others() -> None:
    """A prefix without its tail is worth something, a tail without its prefix is not."""
    stores = Stores(blocks=9)
    _, older = stores.compute(4, first_token=9)
    cursor, ids = stores.compute(4)
    job = stores.plan(cursor, 16, soon_free=4)
    stores.free(ids)
    stores.free(older)
    stores.end(job)
    assert stores.allocate(8) == [*reversed(older), *reversed(ids)]


@pytest.mark.parametrize(
    "reports",
    [(RANK_1, RANK_0), (RANK_0, RANK_1), (RANK_0 | RANK_1,), (RANK_0, RANK_0, RANK_1)],
    ids=["1, 0", "0, 1", "both", "0, 0, 1"],
)
def test_a_store_ends_when_its_last_rank_reports(reports: Sequence[frozenset[int]]) -> None:
    """What a drain has delivered can arrive again with a report that was on its way."""
    stores = Stores(ranks=2)
    cursor, ids = stores.compute(2)
    job = stores.plan(cursor, 8)
    unknown = {99: JobResult(RANK_0 | RANK_1, True), -1: JobResult(RANK_0 | RANK_1, False)}
    stores.planner.complete(unknown)
    for ranks in reports:
        assert stores.references(ids) == [2, 2]
        assert stores.readable(cursor) == [False, False]
        stores.end(job, ranks)
    for ranks in (RANK_0, RANK_0 | RANK_1):
        stores.end(job, ranks)
        assert stores.references(ids) == [1, 1]
        assert stores.readable(cursor) == [True, True]


@pytest.mark.parametrize("failing", [RANK_0, RANK_1])
def test_a_store_that_failed_on_one_rank_leaves_nothing(failing: frozenset[int]) -> None:
    stores = Stores(ranks=2)
    cursor, ids = stores.compute(2)
    job = stores.plan(cursor, 8)
    for rank in (RANK_0, RANK_1):
        stores.end(job, rank, ok=rank != failing)
    assert stores.references(ids) == [1, 1]
    assert stores.readable(cursor) == [False, False]
    assert stores.manager.slots_in_use == 0
    assert stores.skipped() == {"copy_failed": 2}


def test_an_idle_block_is_one_that_only_a_pin_keeps() -> None:
    stores = Stores(blocks=9)
    cursor, ids = stores.compute(2)
    assert not stores.jobs.holds_idle_blocks
    stores.candidates.examine(cursor, 8)
    stores.planner.pin_chosen()
    assert not stores.jobs.holds_idle_blocks, "the request would keep them anyway"
    stores.free(ids)
    assert stores.jobs.holds_idle_blocks
    (job,) = stores.take()
    assert stores.jobs.holds_idle_blocks
    stores.pool.touch([stores.pool.blocks[block] for block in ids])
    assert not stores.jobs.holds_idle_blocks, "another request uses them now"
    stores.free(ids)
    stores.end(job)
    assert not stores.jobs.holds_idle_blocks


# -- budgets -----------------------------------------------------------------------------------


def test_pins_are_capped_at_a_share_of_the_free_blocks_and_the_rest_follows() -> None:
    stores = Stores(blocks=31, share=0.5)
    cursor, ids = stores.compute(18)
    assert stores.pool.get_num_free_blocks() == 12
    stored = []
    while job := stores.plan(cursor, 72):
        stored.append(blocks_of(job))
        stores.end(job)
    assert stored[0] == ids[:6]
    assert [block for job_blocks in stored for block in job_blocks] == ids
    assert stores.skipped() == {}


@pytest.mark.parametrize("free", [1, 0])
def test_one_slot_is_pinned_where_the_share_is_less(free: int) -> None:
    """And another one when it has been stored; but never more blocks than there are."""
    stores = Stores(blocks=8 + free + 1, share=0.1)
    cursor, ids = stores.compute(8)
    first = stores.plan(cursor, 32)
    assert (blocks_of(first) if first else []) == ids[:free]
    assert stores.plan(cursor, 32) is None, "it is still pinned"
    if first:
        stores.end(first)
        assert blocks_of(stores.plan(cursor, 32)) == ids[1:2]


def test_no_slot_is_pinned_of_blocks_that_are_reserved() -> None:
    stores = Stores(blocks=10, share=0.1)
    cursor, ids = stores.compute(8)
    stores.budget.next_step(load_seconds=0.0, grown_blocks=1)
    assert stores.plan(cursor, 32) is None
    stores.requests.admitted = 0
    assert blocks_of(stores.plan(cursor, 32)) == ids[:1]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8, 1.0])
def test_pins_never_exceed_their_share_however_often_it_is_asked(share: float) -> None:
    """Even if the requests whose blocks are pinned end, that share of the free blocks is left."""
    stores = Stores(blocks=31, share=share)
    cursor, _ = stores.compute(18)
    for _ in range(18):
        stores.plan(cursor, 72)
        free = stores.pool.get_num_free_blocks()
        assert stores.jobs.pinned_blocks <= share * (free + stores.jobs.pinned_blocks)


@pytest.mark.parametrize(("groups", "blocks"), [(1, 18), (2, 10)])
def test_blocks_that_are_about_to_be_free_count_once_over_all_groups(
    groups: int, blocks: int
) -> None:
    """Half of 20 blocks, of which the request that is about to end has 18 or all."""
    stores = Stores(*(CacheGroup(group, 4) for group in range(groups)), blocks=21, share=0.5)
    cursor = stores.compute_groups(*[blocks] * groups)
    job = stores.plan(cursor, 4 * blocks, soon_free=groups * blocks)
    assert blocks_of(job) == cursor.block_ids[0][:10]


@pytest.fixture
def most_slots(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many slots one step examines."""
    limit = "kv_offload.scheduler.stores.candidates.MAX_SLOTS_PER_STEP"
    return lambda slots: monkeypatch.setattr(limit, slots)


def test_a_step_examines_a_bounded_number_of_slots(most_slots: Callable[[int], None]) -> None:
    """Over all requests and groups; the rest follows in the next steps."""
    most_slots(5)
    stores = Stores()
    cursor, ids = stores.compute(4)
    other, other_ids = stores.compute(4, first_token=9)
    planned = []
    for _ in range(3):
        stores.candidates.next_step()
        for asking in (cursor, other):
            stores.candidates.examine(asking, 16)
        planned.append([blocks_of(job) for job in stores.take()])
    assert planned == [[[*ids, other_ids[0]]], [other_ids[1:]], []]


def test_known_slots_count_against_the_budget_of_a_step(most_slots: Callable[[int], None]) -> None:
    most_slots(3)
    stores = Stores()
    cursor, ids = stores.compute(4)
    stores.end(stores.plan_anew(cursor, 12))
    assert stores.plan(cursor, 16) is None
    assert blocks_of(stores.plan(cursor, 16)) == ids[3:]


# -- what ended requests left behind -----------------------------------------------------------


def test_what_an_ended_request_left_is_stored_when_there_is_a_budget() -> None:
    """As far as nobody took the blocks meanwhile."""
    stores = Stores(blocks=9, share=0.5)
    cursor, ids = stores.compute(8)
    first = stores.plan(cursor, 32, soon_free=8)
    assert blocks_of(first) == ids[:4]
    assert stores.leftovers.keep(cursor, 32) == 4
    stores.free(ids)
    assert stores.leftovers_step() is None, "all pins are taken"
    assert stores.leftovers.slots == 4
    (taken,) = stores.allocate(1)
    assert taken == ids[7]
    stores.end(first)
    second = stores.leftovers_step()
    assert blocks_of(second) == ids[4:7]
    assert stores.skipped() == {}
    stores.end(second)
    assert stores.leftovers_step() is None
    assert stores.skipped() == {"moved_on": 1}
    assert stores.leftovers.slots == 0
    assert stores.readable(cursor) == [True] * 7 + [False]


def test_leftovers_of_several_groups_are_counted_by_slot(
    most_slots: Callable[[int], None],
) -> None:
    most_slots(2)
    stores = Stores(FULL, CacheGroup(1, 8))
    cursor = stores.compute_groups(4, 2)
    small, large = cursor.block_ids
    stores.plan(cursor, 16)
    left = stores.leftovers.keep(cursor, 16)
    assert (left, stores.leftovers.slots) == (4, 4)
    assert blocks_of(stores.leftovers_step()) == small[2:]
    assert blocks_of(stores.leftovers_step()) == large
    assert stores.leftovers.slots == 0
    assert stores.skipped() == {}


def test_the_oldest_leftovers_are_dropped_when_too_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_offload.scheduler.stores.leftovers.MAX_LEFTOVER_SLOTS", 5)
    stores = Stores()
    for first_token in (7, 8, 9):
        stores.leftovers.keep(stores.compute(2, first_token)[0], 8)
    assert stores.skipped() == {"no_budget": 2}
    assert stores.leftovers.slots == 4
    assert len(blocks_of(stores.leftovers_step())) == 4


def test_leftovers_that_nothing_is_ever_left_for_are_dropped_when_the_engine_is_idle() -> None:
    stores = Stores()
    stores.budget.next_step(load_seconds=0.0, grown_blocks=32)
    cursor, ids = stores.compute(4)
    stores.leftovers.keep(cursor, 16)
    stores.free(ids)
    assert stores.leftovers_step() is None
    assert stores.leftovers.slots == 4
    assert stores.leftovers_step(idle=True) is None
    assert stores.leftovers.slots == 0
    assert stores.skipped() == {"no_budget": 4}


def test_leftovers_are_planned_before_what_a_running_request_keeps() -> None:
    stores = Stores(blocks=9, share=0.5)
    gone, gone_ids = stores.compute(2, first_token=9)
    stores.leftovers.keep(gone, 8)
    stores.free(gone_ids)
    cursor, ids = stores.compute(2)
    stores.candidates.next_step()
    stores.leftovers.examine()
    stores.candidates.examine(cursor, 8)
    (job,) = stores.take()
    stores.leftovers.settle(idle=False)
    assert blocks_of(job) == [*gone_ids, *ids][:3]


def test_a_request_that_was_planned_in_full_leaves_nothing() -> None:
    stores = Stores()
    cursor, _ = stores.compute(5)
    stores.plan(cursor, 20)
    assert stores.leftovers.keep(cursor, 23) == 0
    assert stores.leftovers.keep(cursor, 8) == 0
    assert len(stores.leftovers) == 0
    assert stores.skipped() == {}


# -- what is worth storing ---------------------------------------------------------------------


def test_a_prefix_is_stored_at_its_nth_use() -> None:
    stores = Stores(uses=3)
    cursor, ids = stores.compute(2)
    assert stores.plan_anew(cursor, 8) is None
    assert stores.plan_anew(cursor, 4) is None
    assert stores.skipped() == {"used_too_little": 3}
    assert blocks_of(stores.plan_anew(cursor, 8)) == ids[:1]
    assert stores.skipped() == {"used_too_little": 1}


def test_a_block_that_no_pin_was_left_for_is_not_counted_as_used() -> None:
    stores = Stores(blocks=5, uses=2, share=0.5)
    cursor, ids = stores.compute(4)
    for _ in range(3):
        assert stores.plan_anew(cursor, 16) is None
    assert stores.skipped() == {}
    stores.free(ids)
    assert stores.plan_anew(cursor, 16) is None
    assert sum(stores.skipped().values()) > 0


def test_uses_are_remembered_for_a_bounded_number_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_offload.scheduler.stores.choice.TRACKED_PREFIXES", 2)
    stores = Stores(uses=3)
    a, b, c = (stores.compute(1, first_token)[0] for first_token in (7, 8, 9))
    assert [stores.plan_anew(cursor) for cursor in (a, b, a, c)] == [None] * 4
    assert stores.plan_anew(a), "the least recently used key is forgotten, not the oldest"
    assert [stores.plan_anew(b) is None for _ in range(3)] == [True, True, False]


def test_known_keys_are_used_again() -> None:
    """A prefix that is computed once more is more recent than one that was stored since."""
    stores = Stores(slots=4)
    cursors = [stores.compute(2, first_token)[0] for first_token in (1, 9, 8)]
    again, other, third = cursors
    for cursor in (again, other):
        stores.end(stores.plan_anew(cursor, 8))
    assert stores.plan_anew(again, 8) is None
    stores.end(stores.plan(third, 8))
    readable = [stores.readable(cursor) for cursor in cursors]
    assert readable == [[True, True], [False, False], [True, True]]


def test_known_keys_are_not_evicted_for_their_own_tail() -> None:
    stores = Stores(slots=3)
    cursor, _ = stores.compute(5)
    stores.end(stores.plan_anew(cursor, 12))
    assert stores.plan(cursor, 20) is None
    assert stores.readable(cursor) == [True, True, True, False, False]


def test_a_prefix_that_is_being_stored_is_not_stored_again() -> None:
    stores = Stores()
    cursor, _ = stores.compute(2)
    job = stores.plan(cursor, 8)
    twin, _ = stores.compute(2)
    assert stores.plan(twin, 8) is None
    stores.end(job)
    assert stores.readable(twin) == [True, True]


# -- giving up ---------------------------------------------------------------------------------


def test_an_abandoned_store_is_unpinned_at_once_and_never_readable() -> None:
    stores = Stores(ranks=2)
    cursor, ids = stores.compute(3)
    job = stores.plan(cursor, 12)
    stores.end(job, RANK_0)
    stores.jobs.abandon()
    stores.check()
    assert stores.references(ids) == [1, 1, 1]
    assert (stores.jobs.pending, stores.jobs.running) == (False, 0)
    assert stores.manager.slots_in_use == 3, "a rank may still write them"
    stores.end(job, RANK_0)
    assert stores.manager.slots_in_use == 3
    stores.end(job, RANK_1)
    assert stores.manager.slots_in_use == 0
    assert stores.readable(cursor) == [False] * 3
    assert stores.skipped() == {"copy_failed": 3}
    stores.end(job, RANK_1)
    assert stores.references(ids) == [1, 1, 1]


def test_while_an_abandoned_store_runs_nothing_is_stored() -> None:
    stores = Stores(slots=4)
    cursor, _ = stores.compute(2)
    job = stores.plan(cursor, 8)
    stores.jobs.abandon()
    other, other_ids = stores.compute(2, first_token=9)
    assert stores.plan_anew(other, 8) is None
    assert stores.skipped() == {}, "its turn comes"
    stores.end(job)
    assert blocks_of(stores.plan_anew(other, 8)) == other_ids


def test_stores_survive_a_reset_of_host_memory() -> None:
    stores = Stores()
    cursor, ids = stores.compute(2)
    job = stores.plan(cursor, 8)
    stores.manager.reset()
    assert stores.manager.slots_in_use == 2
    stores.end(job)
    assert stores.references(ids) == [1, 1]
    assert stores.manager.slots_in_use == 0
    assert stores.readable(cursor) == [False, False]


# -- why not -----------------------------------------------------------------------------------


def test_every_reason_not_to_store_occurs() -> None:
    stores = Stores(blocks=15, slots=2, share=0.4, uses=2)
    first, _ = stores.compute(2)
    for _ in range(2):  # used_too_little, then stored
        job = stores.plan_anew(first, 4)
    stores.end(job, ok=False)  # copy_failed
    second, _ = stores.compute(3, first_token=9)
    second.block_ids[0][2:] = stores.allocate(1)
    for _ in range(2):  # moved_on, and both slots are taken
        stores.plan_anew(second, 12)
    assert stores.skipped().keys() == {"used_too_little", "copy_failed", "moved_on"}
    third, third_ids = stores.compute(1, first_token=8)
    stores.free(third_ids)
    for _ in range(2):  # pool_busy
        stores.plan_anew(third, 4)
    stores.leftovers.keep(stores.compute(4, first_token=7)[0], 16)
    stores.leftovers.drop()  # no_budget
    later = stores.skipped().keys()
    assert {"used_too_little", "copy_failed", "moved_on", *later} == set(SKIP_REASONS)
