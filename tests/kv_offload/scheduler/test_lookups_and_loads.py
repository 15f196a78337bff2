from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.messages import LoadJob
from kv_offload.scheduler.load_jobs import LoadJobs
from kv_offload.scheduler.loads.lookups import MAX_WAIT_SECONDS, OFFER_SECONDS, Lookups
from kv_offload.scheduler.request import Phase, RequestTable, TrackedRequest

NULL = 0
FULL = CacheGroup(0, 4)
WINDOW = CacheGroup(1, 4, 6)
HASHES = [b"hash %d" % i for i in range(12)]


def make_key(block_hash: bytes, group_id: int) -> bytes:
    return block_hash + b" of group %d" % group_id


class Loads:
    """Look-ups and the loads that follow, with a host memory that is filled by hand."""

    def __init__(self, *groups: CacheGroup, num_slots: int = 24, kept: int = 0) -> None:
        """Begin with `kept` slots of the first group in host memory."""
        groups = groups or (FULL,)
        self.prefixes = PrefixMap(groups, 4, make_key)
        self.manager = CacheManager(make_policy("lru", num_slots))
        self.requests = RequestTable()
        self.lookups = Lookups(self.prefixes, self.manager)
        self.jobs = LoadJobs(self.prefixes, self.manager, NULL, num_ranks=1)
        self.keep(range(kept), groups[0])

    def keep(self, slots: Sequence[int], group: CacheGroup = FULL) -> dict[int, int]:
        """Store slots of the prefix; return where each of them is."""
        plan = self.manager.prepare_store([self.key(slot, group) for slot in slots])
        self.manager.complete_store(plan)
        return dict(zip(slots, plan.tolist(), strict=True))

    def use(self, slots: Sequence[int]) -> None:
        """Count an access to slots of the prefix."""
        self.manager.prepare_store([], self.manager.find([self.key(slot) for slot in slots]))

    def key(self, slot: int, group: CacheGroup = FULL) -> bytes:
        """Return the key of a slot."""
        block_hash = HASHES[(slot + 1) * group.block_tokens // 4 - 1]
        return make_key(block_hash, group.group_id) if group.group_id else block_hash

    def match(self, request_id: str, start: int = 0, tokens: int = 25) -> int | None:
        tracked = self.tracked(request_id)
        tracked.request.num_tokens = tokens
        return self.lookups.match(tracked, start)

    def tracked(self, request_id: str) -> TrackedRequest:
        request = SimpleNamespace(request_id=request_id, block_hashes=HASHES, num_tokens=0)
        tracked = self.requests.track(request)
        assert tracked is not None
        return tracked

    def add(self, request_id: str, start: int, end: int, *block_ids: Sequence[int]) -> None:
        """Give a request its blocks and queue its load."""
        tracked = self.tracked(request_id)
        self.requests.admit(tracked, Phase.LOADING, block_ids)
        self.lookups.expect(tracked, self.jobs.add(tracked, start, end, synchronous=False))

    def plan(self, request_id: str, start: int, end: int, *block_ids: Sequence[int]) -> LoadJob:
        self.add(request_id, start, end, *block_ids)
        (job,) = self.jobs.take_planned()
        self.manager.check_integrity()
        self.lookups.check_integrity()
        return job

    def settle(self, request_id: str) -> None:
        """Schedule a request with its blocks."""
        self.lookups.settle(self.tracked(request_id))

    def forget(self, request_id: str) -> None:
        """End a request."""
        tracked = self.tracked(request_id)
        self.lookups.settle(tracked)
        self.requests.end(tracked)

    def complete(self, request_id: str) -> None:
        """End a load on all ranks."""
        tracked = self.requests.of_report(request_id)
        assert tracked is not None
        self.jobs.complete(tracked)
        self.requests.settle(tracked)

    def is_loading(self, request_id: str) -> bool:
        tracked = self.requests.of_report(request_id)
        return tracked is not None and tracked.held is not None

    def load(self, request_id: str, start: int = 0, end: int = 8) -> LoadJob:
        """Match a request and plan its load, as the engine does when it allocates."""
        assert self.match(request_id, start, tokens=end + 1) == end - start
        return self.plan(request_id, start, end, list(range(10, 10 + end // 4)))

    def is_held(self, slot: int) -> bool:
        """Tell whether a slot of the prefix outlives an eviction of everything that can go."""
        newcomers = [b"newcomer %d" % i for i in range(self.manager.num_slots)]
        plan = self.manager.prepare_store(newcomers)
        held = self.manager.readable([self.key(slot)])[0]
        self.manager.complete_store(plan, ok=False)
        return held


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that look-ups read, in an only element."""
    now = [1000.0]
    monkeypatch.setattr("kv_offload.scheduler.loads.lookups.time.monotonic", lambda: now[0])
    return now


# -- matching ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "start", "tokens", "matched"),
    [
        pytest.param(0, 0, 25, 0, id="an empty host memory"),
        pytest.param(3, 0, 13, 12, id="one token is left to compute"),
        pytest.param(3, 0, 12, 12, id="the engine computes the last one again"),
        pytest.param(3, 0, 5, 4, id="a short prompt"),
        pytest.param(3, 0, 4, 0, id="the last slot alone is not loaded"),
        pytest.param(3, 8, 12, 0, id="nor behind a local hit"),
        pytest.param(3, 4, 12, 8, id="with another one it is"),
        pytest.param(3, 8, 13, 4, id="the token behind it is computed in any case"),
        pytest.param(5, 8, 25, 12, id="a match counts from the local hit"),
        pytest.param(2, 12, 25, 0, id="a local hit that covers more than host memory"),
        pytest.param(5, 6, 25, 0, id="a local hit inside a block, the target of a copy-on-write"),
    ],
)
def test_what_is_matched(kept: int, start: int, tokens: int, matched: int) -> None:
    loads = Loads(kept=kept)
    assert loads.match("a", start, tokens) == matched


@pytest.mark.parametrize(
    "group",
    [
        CacheGroup(0, 4, window_tokens=6),
        CacheGroup(0, 4, chunk_tokens=12),
        CacheGroup(0, 4, holds_state=True),
        CacheGroup(0, 4, sees_next_token=True),
    ],
)
def test_only_full_attention_serves_a_whole_request(group: CacheGroup) -> None:
    loads = Loads(group, kept=4)
    assert loads.match("a", tokens=12) == 8


@pytest.mark.parametrize(
    "group", [CacheGroup(0, 4, window_tokens=1), CacheGroup(0, 4, chunk_tokens=8)]
)
def test_where_a_query_reads_no_token_before_it_there_is_nothing_to_load(group: CacheGroup) -> None:
    """A window of one token, and the first token of a chunk."""
    assert Loads(group, kept=2).match("a", tokens=9) == 0


def test_a_local_hit_must_end_on_a_block_of_every_group() -> None:
    loads = Loads(FULL, CacheGroup(1, 8), kept=6)
    loads.keep(range(3), CacheGroup(1, 8))
    assert loads.match("a", start=4) == 0
    assert loads.match("a", start=8) == 16


def test_asked_again_it_answers_the_same_and_changes_nothing() -> None:
    loads = Loads(kept=4)
    assert [loads.match("a") for _ in range(3)] == [16, 16, 16]
    assert loads.jobs.running == 0
    assert loads.jobs.take_planned() == ()
    assert not loads.is_held(0)


def test_the_answer_follows_host_memory() -> None:
    loads = Loads()
    assert loads.match("a") == 0
    loads.keep(range(2))
    assert loads.match("a") == 8
    loads.manager.reset()
    assert loads.match("a") == 0


# -- asked again in every step -----------------------------------------------------------------


def count_lookups(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of keys of every look-up from now on."""
    counts: list[int] = []
    readable = loads.manager.readable

    def counted(keys: Sequence[bytes]) -> Any:
        counts.append(len(keys))
        return readable(keys)

    monkeypatch.setattr(loads.manager, "readable", counted)
    return counts


def test_while_nothing_changes_no_block_is_looked_at_again(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(kept=4)
    counts = count_lookups(loads, monkeypatch)
    assert loads.match("a") == 16
    asked = len(counts)
    assert asked > 0
    clock[0] += OFFER_SECONDS / 2
    assert loads.match("a") == 16
    assert len(counts) == asked
    for other in ({"start": 4, "tokens": 25}, {"start": 0, "tokens": 13}):
        del counts[:]
        assert loads.match("a", **other) == 12
        assert counts, "what was found for other tokens says nothing"


@pytest.mark.parametrize(("kept", "asked"), [(0, 8), (12, 24)])
def test_windows_that_are_not_there_are_not_looked_for_in_every_step(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, kept: int, asked: int
) -> None:
    """Nor at all if another group has nothing either."""
    window, full = CacheGroup(0, 4, 6), CacheGroup(1, 4)
    loads = Loads(window, full)
    loads.keep(range(kept), full)
    counts = count_lookups(loads, monkeypatch)
    assert loads.match("a", tokens=49) == 0
    assert sum(counts) == asked
    clock[0] += OFFER_SECONDS / 2
    assert loads.match("a", tokens=49) == 0
    assert sum(counts) == asked
    loads.keep(range(12), window)
    loads.keep(range(kept, 12), full)
    assert loads.match("a", start=16, tokens=49) == 32, "of another start nothing was known"
    assert loads.match("a", tokens=49) == 48
    assert loads.match("b", tokens=49) == 48


def test_an_eviction_of_others_has_the_blocks_looked_up_once(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(num_slots=5)
    loads.manager.complete_store(loads.manager.prepare_store([b"other"]))
    loads.keep(range(4))
    assert loads.match("a") == 16
    loads.manager.complete_store(loads.manager.prepare_store([b"newcomer"]))
    assert not loads.manager.readable([b"other"])[0]
    counts = count_lookups(loads, monkeypatch)
    assert [loads.match("a") for _ in range(3)] == [16, 16, 16]
    assert counts == [4]
    loads.manager.complete_store(loads.manager.prepare_store([b"another"]))
    assert loads.match("a") == 12


def test_an_eviction_of_its_own_shortens_the_answer(clock: list[float]) -> None:
    loads = Loads(num_slots=4)
    kept = loads.keep(range(4))
    loads.use(range(3))
    assert loads.match("a") == 16
    plan = loads.manager.prepare_store([b"newcomer"])
    assert plan.tolist() == [kept[3]]
    assert loads.match("a") == 12


def test_a_proof_that_was_evicted_proves_nothing_any_more(clock: list[float]) -> None:
    """KV that depends on the next token: the slot behind the end is not loaded, but needed."""
    group = CacheGroup(0, 4, sees_next_token=True)
    loads = Loads(group, num_slots=4)
    kept = loads.keep(range(4), group)
    loads.use(range(3))
    assert loads.match("a") == 12
    assert loads.manager.prepare_store([b"newcomer"]).tolist() == [kept[3]]
    assert loads.match("a") == 8


def test_a_prefix_that_grows_is_seen_in_time(clock: list[float]) -> None:
    loads = Loads(kept=2)
    assert loads.match("a") == 8
    loads.keep(range(2, 4))
    clock[0] += OFFER_SECONDS / 2
    assert loads.match("a") == 8
    clock[0] += OFFER_SECONDS
    assert loads.match("a") == 16


def test_a_load_that_begins_meanwhile_is_waited_for(clock: list[float]) -> None:
    loads = Loads(kept=2)
    assert loads.match("second") == 8
    loads.load("first")
    assert loads.match("second") is None
    loads.settle("first")
    assert loads.match("second") == 8


@pytest.mark.parametrize("end", ["admit", "forget"])
def test_an_offer_is_remembered_until_the_request_is_admitted_or_ends(
    end: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(kept=2)
    assert loads.match("a") == 8
    if end == "admit":
        loads.requests.admit(loads.tracked("a"), Phase.READY, [[10, 11]])
    else:
        loads.forget("a")
    counts = count_lookups(loads, monkeypatch)
    assert loads.match("a") == 8
    assert counts


# -- waiting for another's load ----------------------------------------------------------------


def waiting() -> Loads:
    """Return look-ups of two requests, of which the second waits for the load of the first."""
    loads = Loads(kept=2)
    loads.load("first")
    assert loads.match("second") is None
    return loads


def test_a_request_that_needs_other_keys_does_not_wait() -> None:
    """The first loads two blocks; the second has them on the engine's side already."""
    loads = Loads(kept=4)
    loads.match("first", tokens=9)
    loads.plan("first", 0, 8, [10, 11])
    assert loads.match("second", start=8) == 8


def test_a_request_does_not_wait_for_itself() -> None:
    """Asked again after its load failed, or after it was preempted in the middle."""
    loads = Loads(kept=2)
    loads.load("a")
    assert loads.match("a") == 8
    assert loads.match("other") == 8, "asking again must have settled the first load"


def test_waiting_ends_after_a_bound_for_each_request_on_its_own(clock: list[float]) -> None:
    loads = waiting()
    clock[0] += MAX_WAIT_SECONDS
    assert loads.match("second") is None
    assert loads.match("third") is None
    clock[0] += 0.001
    assert loads.match("second") == 8
    assert loads.match("third") is None


def test_waiting_for_one_load_after_another_is_one_wait(clock: list[float]) -> None:
    """Each time another request loads the keys before the one that waits is asked again."""
    loads = waiting()
    clock[0] += MAX_WAIT_SECONDS
    loads.settle("first")
    loads.load("third")
    assert loads.match("second") is None
    clock[0] += 0.001
    assert loads.match("second") == 8


def test_a_wait_that_ended_starts_anew(clock: list[float]) -> None:
    loads = waiting()
    loads.settle("first")
    assert loads.match("second") == 8
    clock[0] += 2 * MAX_WAIT_SECONDS
    loads.load("fourth")
    assert loads.match("second") is None


def test_a_wait_is_forgotten_with_its_request(clock: list[float]) -> None:
    loads = waiting()
    loads.forget("second")
    clock[0] += 2 * MAX_WAIT_SECONDS
    assert loads.match("second") is None


def test_a_load_that_nobody_waits_for_any_more_stops_nobody_else(clock: list[float]) -> None:
    """Two load the same keys, once the second has given up waiting; the first ends first."""
    loads = waiting()
    clock[0] += 2 * MAX_WAIT_SECONDS
    loads.load("second")
    loads.settle("first")
    assert loads.match("third") is None
    loads.settle("second")
    assert loads.match("third") == 8


@pytest.mark.parametrize("end", ["settle", "forget"])
def test_others_wait_until_the_first_is_scheduled_or_gone(end: str) -> None:
    loads = Loads(kept=2)
    loads.load("first")
    loads.complete("first")
    assert loads.match("second") is None, "the engine does not know the blocks before it runs"
    getattr(loads, end)("first")
    assert loads.match("second") == 8


# -- lifetimes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", ["is_loading", "settle", "forget"])
def test_slots_are_held_until_the_load_is_complete(meanwhile: str) -> None:
    """Also where the request is gone by then."""
    loads = Loads(num_slots=4, kept=4)
    loads.load("a")
    getattr(loads, meanwhile)("a")
    assert loads.is_loading("a")
    assert loads.jobs.running == 1
    assert loads.is_held(0)
    assert loads.is_held(1)
    loads.complete("a")
    assert not loads.is_loading("a")
    assert loads.jobs.running == 0
    assert not loads.is_held(0)


def test_each_of_two_loads_holds_its_slots() -> None:
    loads = Loads(num_slots=4, kept=4)
    loads.load("a")
    loads.settle("a")
    loads.load("b")
    assert loads.jobs.running == 2
    for _ in range(2):  # it ends once
        loads.complete("a")
        assert loads.jobs.running == 1
        assert loads.is_held(0)
    loads.complete("b")
    assert not loads.is_held(0)


def test_a_load_survives_a_reset_of_host_memory() -> None:
    loads = Loads(num_slots=4, kept=4)
    loads.load("a")
    loads.manager.reset()
    assert loads.manager.slots_in_use == 2
    loads.complete("a")
    loads.manager.check_integrity()
    assert loads.manager.slots_in_use == 0


# -- plans -------------------------------------------------------------------------------------


def pairs(job: LoadJob) -> list[list[int]]:
    assert job.pairs.dtype == np.int32
    assert job.pairs.shape == (len(job.pairs), 2)
    return job.pairs.tolist()


def test_a_plan_pairs_blocks_with_the_slots_of_their_keys() -> None:
    """Though it was offered more."""
    loads = Loads()
    slots = loads.keep([3, 1, 4, 2, 0])
    assert loads.match("a", start=4, tokens=21) == 16
    job = loads.plan("a", 4, 16, [10, 11, 12, 13, 14])
    assert pairs(job) == [[11, slots[1]], [12, slots[2]], [13, slots[3]]]
    assert (job.request_id, job.incomplete) == ("a", False)


def test_jobs_are_numbered_and_handed_out_once() -> None:
    loads = Loads(kept=4)
    loads.add("a", 0, 4, [10])
    loads.add("b", 0, 8, [11, 12])
    jobs = loads.jobs.take_planned()
    assert [(job.job_id, job.request_id) for job in jobs] == [(0, "a"), (1, "b")]
    assert loads.jobs.take_planned() == ()


def test_the_null_blocks_of_a_window_are_left_out() -> None:
    """The query at 20 reads the window group from 15 on."""
    loads = Loads(FULL, WINDOW)
    full = loads.keep(range(5))
    window = loads.keep([3, 4], WINDOW)
    job = loads.plan("a", 0, 20, [10, 11, 12, 13, 14], [NULL, NULL, NULL, 15, 16])
    assert not job.incomplete
    assert pairs(job) == [
        *([10 + block, full[block]] for block in range(5)),
        [15, window[3]],
        [16, window[4]],
    ]


def test_slots_in_front_of_the_start_are_not_held() -> None:
    loads = Loads(num_slots=3)
    slots = loads.keep([0, 1, 2])
    assert loads.match("a", start=4, tokens=13) == 8
    job = loads.plan("a", 4, 12, [10, 11, 12])
    assert pairs(job) == [[11, slots[1]], [12, slots[2]]]
    assert loads.manager.slots_in_use == 3
    assert not loads.is_held(0), "slot 0 is not read, so it is not held"


def test_a_plan_for_fewer_tokens_than_offered_can_lack_a_window_block() -> None:
    """Offered 20 tokens, for which the window needs blocks 3 and 4; 16 would need block 2 too."""
    loads = Loads(FULL, WINDOW, num_slots=8, kept=5)
    loads.keep([3, 4], WINDOW)
    assert loads.match("a", tokens=21) == 20
    job = loads.plan("a", 0, 16, [10, 11, 12, 13], [NULL, NULL, 14, 15])
    assert job.incomplete
    assert {block for block, _ in pairs(job)} == {10, 11, 12, 13, 14, 15}, "all of them are zeroed"
    assert loads.is_loading("a"), "the ranks report it like any other load"
    assert not loads.is_held(0)
    loads.complete("a")
    loads.manager.check_integrity()


def test_nobody_waits_for_an_incomplete_load_that_was_asked_again() -> None:
    loads = Loads(FULL, WINDOW, kept=5)
    loads.keep([3, 4], WINDOW)
    loads.match("a", tokens=21)
    loads.plan("a", 0, 16, [10, 11, 12, 13], [NULL, NULL, 14, 15])
    assert loads.match("b", tokens=21) is None
    loads.complete("a")
    loads.match("a", tokens=21)
    assert loads.match("b", tokens=21) == 20


def test_a_key_that_was_evicted_since_the_match_makes_the_plan_incomplete() -> None:
    loads = Loads(num_slots=2, kept=2)
    assert loads.match("a", tokens=9) == 8
    plan = loads.manager.prepare_store([b"newcomer"])
    loads.manager.complete_store(plan)
    job = loads.plan("a", 0, 8, [10, 11])
    assert job.incomplete
    loads.complete("a")
    loads.manager.check_integrity()
