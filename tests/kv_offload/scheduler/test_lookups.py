"""What a waiting request is offered, for whose load it waits, and which slots a load holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from kv_offload.cache.prefix import CacheGroup
from kv_offload.config import OffloadConfig
from kv_offload.messages import LoadJob, OffloadWorkerMetadata, Outcome, RankReport, WorkerCapacity
from kv_offload.scheduler.core import EngineFacts, SlotFacts
from kv_offload.scheduler.loads.lookups import MAX_WAIT_SECONDS, OFFER_SECONDS, STEP_KEYS
from kv_offload.scheduler.scheduler import OffloadScheduler
from tests.support.loads import set_synchronous_loads

FULL, WINDOW = CacheGroup(0, 4), CacheGroup(1, 4, 6)
HASHES = [b"hash %d" % i for i in range(12)]

EMPTY_STEP: Any = SimpleNamespace(
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    ),
)


def make_key(block_hash: bytes, group_id: int) -> bytes:
    return block_hash + b" of group %d" % group_id


class Asked:
    """A scheduler's half that is asked by hand, with a host memory that is filled by hand."""

    def __init__(self, *groups: CacheGroup, num_slots: int = 24, kept: int = 0) -> None:
        """Begin with `kept` slots of the first group in host memory."""
        groups = groups or (FULL,)
        pool: Any = BlockPool(2, enable_caching=True, hash_block_size=4)
        config = OffloadConfig(cpu_bytes=64 * num_slots)
        self.offload = OffloadScheduler(
            config, EngineFacts(groups, pool, make_key), SlotFacts(num_slots, 64, 64)
        )
        self.offload.take_capacities([WorkerCapacity(0, num_slots, num_slots)])
        set_synchronous_loads(self.offload, False)
        self.manager = self.offload.manager
        self.requests: dict[str, Any] = {}
        self.keep(range(kept), groups[0])

    def key(self, slot: int, group: CacheGroup = FULL) -> bytes:
        block_hash = HASHES[(slot + 1) * group.block_tokens // 4 - 1]
        return make_key(block_hash, group.group_id) if group.group_id else block_hash

    def keep(self, slots: Sequence[int], group: CacheGroup = FULL) -> dict[int, int]:
        stored = self.manager.prepare_store([self.key(slot, group) for slot in slots])
        self.manager.complete_store(stored)
        return dict(zip(slots, stored.tolist(), strict=True))

    def keep_other(self, key: bytes) -> list[int]:
        stored = self.manager.prepare_store([key])
        self.manager.complete_store(stored)
        return stored.tolist()

    def use(self, slots: Sequence[int]) -> None:
        self.manager.prepare_store([], self.manager.find([self.key(slot) for slot in slots]))

    def match(self, request_id: str, start: int = 0, tokens: int = 25) -> int | None:
        """Ask what can be loaded for a request of so many tokens behind its local hit."""
        request = SimpleNamespace(
            request_id=request_id,
            block_hashes=HASHES,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            skip_reading_prefix_cache=False,
            kv_transfer_params=None,
        )
        request = self.requests.setdefault(request_id, request)
        request.num_tokens = tokens
        return self.offload.match(request, start)[0]

    def admit(self, request_id: str, start: int, end: int, *ids: Sequence[int]) -> None:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: ids)
        self.offload.allocated(self.requests[request_id], blocks, end - start)

    def plan(self, request_id: str, start: int, end: int, *ids: Sequence[int]) -> LoadJob:
        self.admit(request_id, start, end, *ids)
        (job,) = self.offload.plan_step(EMPTY_STEP).loads
        self.offload.check_integrity()
        return job

    def load(self, request_id: str, start: int = 0, end: int = 8) -> LoadJob:
        assert self.match(request_id, start, tokens=end + 1) == end - start
        return self.plan(request_id, start, end, list(range(10, 10 + end // 4)))

    def schedule(self, request_id: str) -> None:
        """Run a request whose load has ended: the engine gives it its blocks once more."""
        self.admit(request_id, 0, 0, [10, 11])

    def forget(self, request_id: str) -> None:
        self.offload.finished(self.requests.pop(request_id), None)

    def complete(self, job: LoadJob) -> None:
        told = RankReport({job.job_id: Outcome.FAILED if job.incomplete else Outcome.OK})
        self.offload.apply_report(OffloadWorkerMetadata({0: told}))
        self.offload.check_integrity()

    @property
    def running_loads(self) -> float:
        return self.offload.gauges()["running_loads"]

    def is_held(self, slot: int) -> bool:
        """Tell whether a slot of the prefix outlives an eviction of everything that can go."""
        newcomers = [b"newcomer %d" % i for i in range(self.manager.num_slots)]
        stored = self.manager.prepare_store(newcomers)
        held = self.manager.readable([self.key(slot)])[0]
        self.manager.complete_store(stored, ok=False)
        return bool(held)


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
def test_what_is_matched(kept, start, tokens, matched):
    assert Asked(kept=kept).match("a", start, tokens) == matched


@pytest.mark.parametrize(
    ("group", "tokens", "matched"),
    [
        (CacheGroup(0, 4, window_tokens=6), 12, 8),
        (CacheGroup(0, 4, chunk_tokens=12), 12, 8),
        (CacheGroup(0, 4, holds_state=True), 12, 8),
        (CacheGroup(0, 4, sees_next_token=True), 12, 8),
        pytest.param(CacheGroup(0, 4, window_tokens=1), 9, 0, id="a token reads itself alone"),
        pytest.param(CacheGroup(0, 4, chunk_tokens=8), 9, 0, id="the first token of a chunk"),
    ],
)
def test_only_full_attention_serves_a_whole_request(group, tokens, matched):
    """And where a query reads no token before it there is nothing to load."""
    assert Asked(group, kept=4).match("a", tokens=tokens) == matched


@pytest.fixture
def count_lookups(monkeypatch: pytest.MonkeyPatch) -> Callable[[Asked], list[int]]:
    """Returns a list that gets the number of keys of every look-up from now on."""

    def count(asked: Asked) -> list[int]:
        counts: list[int] = []
        readable = asked.manager.readable

        def counted(keys: Sequence[bytes]) -> Any:
            counts.append(len(keys))
            return readable(keys)

        monkeypatch.setattr(asked.manager, "readable", counted)
        return counts

    return count


def test_while_nothing_changes_no_block_is_looked_at_again(now, count_lookups):
    asked = Asked(kept=4)
    counts = count_lookups(asked)
    assert asked.match("a") == 16
    before = len(counts)
    assert before > 0
    now[0] += OFFER_SECONDS / 2
    assert asked.match("a") == 16
    assert len(counts) == before
    for other in ({"start": 4, "tokens": 25}, {"start": 0, "tokens": 13}):
        del counts[:]
        assert asked.match("a", **other) == 12
        assert counts, "what was found for other tokens says nothing"


def test_an_eviction_of_others_has_the_blocks_looked_up_once(now, count_lookups):
    asked = Asked(num_slots=5)
    (other,) = asked.keep_other(b"other")
    asked.keep(range(4))
    assert asked.match("a") == 16
    assert asked.keep_other(b"newcomer") == [other]
    counts = count_lookups(asked)
    assert [asked.match("a") for _ in range(3)] == [16, 16, 16]
    assert counts == [4]
    asked.keep_other(b"another")
    assert asked.match("a") == 12


@pytest.mark.parametrize(("sees_next_token", "answers"), [(False, [16, 12]), (True, [12, 8])])
def test_an_eviction_of_its_own_shortens_the_answer(now, sees_next_token, answers):
    """Also of the slot behind the end, if KV depends on the next token: it proves the end."""
    group = CacheGroup(0, 4, sees_next_token=sees_next_token)
    asked = Asked(group, num_slots=4)
    kept = asked.keep(range(4), group)
    asked.use(range(3))
    assert asked.match("a") == answers[0]
    assert asked.keep_other(b"newcomer") == [kept[3]]
    assert asked.match("a") == answers[1]


def waiting() -> Asked:
    """Return a half with two requests, of which the second waits for the load of the first."""
    asked = Asked(kept=2)
    assert asked.match("second") == 8
    asked.load("first")
    assert asked.match("second") is None, "the load began after it was offered the same"
    return asked


def test_waiting_ends_after_a_bound_for_each_request_on_its_own(now):
    asked = waiting()
    now[0] += MAX_WAIT_SECONDS
    assert asked.match("second") is None
    assert asked.match("third") is None
    now[0] += 0.001
    assert asked.match("second") == 8
    assert asked.match("third") is None


def test_waiting_for_one_load_after_another_is_one_wait(now):
    """Each time another request loads the keys before the one that waits is asked again."""
    asked = waiting()
    now[0] += MAX_WAIT_SECONDS
    asked.schedule("first")
    asked.load("third")
    assert asked.match("second") is None
    now[0] += 0.001
    assert asked.match("second") == 8


@pytest.mark.parametrize("end", ["schedule", "forget"])
def test_others_wait_until_the_first_is_scheduled_or_gone(end):
    asked = Asked(kept=2)
    asked.complete(asked.load("first"))
    assert asked.match("second") is None, "the engine does not know the blocks before it runs"
    getattr(asked, end)("first")
    assert asked.match("second") == 8


def test_those_that_share_what_is_loaded_are_looked_up_in_no_block(count_lookups):
    asked = Asked(kept=6)
    asked.load("first", end=24)
    counts = count_lookups(asked)
    assert [asked.match(f"{i}", tokens=49) for i in range(20)] == [None] * 20
    assert counts == []
    asked.offload.resets.reset_cache()
    assert asked.match("0", tokens=49) == 0, "it waited for what was loaded"
    assert asked.match("after a reset") == 0


def test_one_that_shares_too_little_for_a_window_of_its_own_does_not_wait():
    """Of a window, host memory has what the end of the other one's prefix reads."""
    full, window = CacheGroup(0, 4), CacheGroup(1, 4, 6)
    asked = Asked(full, window, kept=6)
    asked.keep(range(4, 6), window)
    assert asked.match("first", tokens=25) == 24
    asked.admit("first", 0, 24, list(range(10, 16)), [0, 0, 0, 0, 14, 15])
    assert asked.match("all of it", tokens=25) is None
    assert asked.match("shorter", tokens=13) == 0


def test_a_step_that_has_looked_up_enough_leaves_the_others_to_the_next():
    asked = Asked(kept=2)
    asked.offload._lookups.spend(STEP_KEYS - 1)
    assert asked.match("a") == 8, "a look-up that begins is not cut"
    assert asked.match("b") is None
    assert asked.match("a") == 8, "it is known"
    asked.offload.plan_step(EMPTY_STEP)
    assert asked.match("b") == 8


def test_what_is_looked_up_below_does_not_take_the_place_of_a_look_up(monkeypatch):
    """A tier may spend all that a step has, in every step in which it looks."""
    asked = Asked(kept=6)

    def waits(*_):
        asked.offload._lookups.spend(STEP_KEYS)
        return False

    monkeypatch.setattr(type(asked.offload.tiers), "waits", waits)
    assert asked.match("a") == 24


def test_a_step_whose_plan_failed_begins_the_next_one_all_the_same():
    asked = Asked(kept=2)
    asked.offload._lookups.spend(STEP_KEYS)
    assert asked.match("a") is None
    asked.offload.plan_after_error(EMPTY_STEP)
    assert asked.match("a") == 8


@pytest.mark.parametrize("meanwhile", [None, "schedule", "forget"])
def test_slots_are_held_until_every_load_of_them_has_ended(meanwhile):
    asked = Asked(num_slots=4, kept=4)
    first = asked.load("a", end=4)
    if meanwhile is not None:
        getattr(asked, meanwhile)("a")
    second = asked.load("b", start=4) if meanwhile is None else asked.load("b")
    for job, running, held in ((None, 2, True), (first, 1, meanwhile is not None)):
        if job is not None:
            asked.complete(job)
            asked.complete(job)  # it ends once
        assert asked.running_loads == running
        assert asked.is_held(0) == held
    assert asked.is_held(1)
    asked.complete(second)
    assert asked.running_loads == 0
    assert not asked.is_held(1)


def test_a_key_that_was_evicted_since_the_match_makes_the_plan_incomplete():
    asked = Asked(num_slots=2, kept=2)
    assert asked.match("a", tokens=9) == 8
    asked.keep_other(b"newcomer")
    job = asked.plan("a", 0, 8, [10, 11])
    assert job.incomplete
    asked.complete(job)
    assert asked.offload.take_effects().failed == {"a"}
