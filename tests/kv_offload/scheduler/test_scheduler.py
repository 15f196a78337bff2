"""The scheduler's half under vLLM's own scheduler, in a played engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_swap.engine import Direction
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.drain import drain_engine_core
from kv_offload.engines.vllm.versions import reports_failed_requests, vllm_version
from kv_offload.messages import (
    DrainAnswer,
    LoadJob,
    StoreJob,
    WorkerCapacity,
)
from kv_offload.scheduler.budget import (
    HORIZON_STEPS,
    MIN_HORIZON_SECONDS,
    SHARE_BESIDE_LOADS,
    StoreBudget,
)
from kv_offload.scheduler.loads import IDLE_SECONDS, WHOLE_SECONDS
from kv_offload.scheduler.statistics import GAUGE_SECONDS
from tests.support.configurations import make_kv_cache_config
from tests.support.manual_copies import ManualSwapEngine
from tests.support.played_engine import (
    OTHER,
    PROMPT,
    PlayedEngine,
    RestlessError,
    answer,
    forget,
    pinned,
    store,
    tables,
)
from tests.support.played_model import Tokens

pytestmark = pytest.mark.filterwarnings("default")

BLOCK = 4
NEWER = reports_failed_requests(vllm_version())
FULL, WINDOW = CacheGroup(0, BLOCK), CacheGroup(1, BLOCK, 6)
CHUNKS = CacheGroup(1, BLOCK, chunk_tokens=8)
STATE = CacheGroup(1, BLOCK, holds_state=True)

both_ways = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def blocks(count: int) -> int:
    """Return the bytes of blocks in the totals."""
    return count * 64


def stored_blocks(output: Any) -> list[int]:
    return [int(b) for job in output.kv_connector_metadata.stores for b in job.pairs[:, 0]]


def ends_of(engine: PlayedEngine, request: Request, ids: Sequence[int]) -> list[int]:
    """Return how many tokens of the request are in and before each of its blocks."""
    (table,) = tables(engine, request)
    return [(table.index(block) + 1) * BLOCK for block in ids]


# -- storing and serving -----------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [(FULL,), (FULL, WINDOW), (CacheGroup(0, BLOCK, 10),), (FULL, CHUNKS)],
)
@pytest.mark.parametrize("synchronous_loads", [False, True])
def test_a_prompt_is_stored_once_and_served_later(
    async_scheduling: bool,
    ranks: int,
    groups: tuple[CacheGroup, ...],
    synchronous_loads: bool,
) -> None:
    engine = PlayedEngine(
        groups,
        ranks=ranks,
        async_scheduling=async_scheduling,
        synchronous_loads=synchronous_loads,
        plugin={"max_pinned_share": 1.0},
    )
    engine.add("first", PROMPT)
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(24 // BLOCK * len(groups) * ranks)
    assert engine.totals["hit_tokens"] == 0
    forget(engine)
    engine.add("second", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    assert engine.totals["loaded_bytes"] > 0
    assert engine.answers["second"] == engine.answers["first"] == answer(PROMPT)
    engine.check_rest()


def test_a_chunked_prefill_stores_what_each_step_computed() -> None:
    engine = PlayedEngine(max_num_batched_tokens=10)
    request = engine.add("a", PROMPT, max_tokens=1)
    ends = []
    for _ in range(3):
        output = engine.schedule()
        ends.append(ends_of(engine, request, stored_blocks(output)))
        engine.execute()
        engine.run_copies()
        engine.process()
    assert ends == [[4, 8], [12, 16, 20], []]
    engine.run()
    engine.check_rest()


def test_stores_are_submitted_in_the_next_step() -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT)
    engine.step()
    assert engine.ranks[0].copies.in_flight == 0
    engine.step()
    assert [job.direction for job in engine.ranks[0].copies.submitted] == [Direction.STORE]
    engine.run()
    engine.check_rest()


def test_the_last_blocks_of_a_request_are_stored_after_its_end() -> None:
    """An idle engine goes on stepping until the last store is reported."""
    engine = PlayedEngine()
    engine.add("a", PROMPT[:7], max_tokens=2)
    engine.step(copies=True)
    engine.step(copies=True)
    assert engine.answers["a"] == answer(PROMPT[:7], 2)
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.connector.has_pending_push_work()
    assert engine.scheduler.has_requests()
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(2)
    assert not engine.connector.has_pending_push_work()
    engine.check_rest()


def test_a_local_hit_is_extended() -> None:
    engine = PlayedEngine()
    store(engine, PROMPT)
    engine.add("short", PROMPT[:9], max_tokens=1)
    engine.run()
    assert engine.totals["hit_tokens"] == 8
    engine.add("long", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 8 + 12
    assert engine.totals["loaded_bytes"] == blocks(5)
    assert engine.answers["long"] == answer(PROMPT)
    engine.check_rest()


def test_prompt_blocks_only() -> None:
    engine = PlayedEngine(plugin={"store_blocks": "prompt"})
    engine.add("a", PROMPT, max_tokens=12)
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(5)
    engine.check_rest()


def test_a_request_that_skips_the_cache_loads_nothing_and_is_stored() -> None:
    engine = PlayedEngine()
    store(engine, PROMPT)
    engine.add("a", [*PROMPT, *OTHER], skip_reading_prefix_cache=True)
    engine.run()
    assert (engine.totals["hit_tokens"], engine.totals["lookup_tokens"]) == (0, 0)
    assert engine.totals["stored_bytes"] == blocks(6)
    engine.check_rest()


def test_blocks_are_stored_when_their_prefix_is_used_again() -> None:
    engine = PlayedEngine(plugin={"store_after_uses": 2})
    for request_id, stored in (("first", 0), ("second", 5)):
        engine.add(request_id, PROMPT, max_tokens=1)
        engine.run()
        assert engine.totals["stored_bytes"] == blocks(stored)
    assert engine.totals["skipped_used_too_little"] == 5
    engine.check_rest()


def test_groups_with_blocks_of_two_sizes_lose_no_block() -> None:
    """vLLM names the blocks of all groups up to a multiple of the largest; the rest comes later."""
    engine = PlayedEngine((CacheGroup(0, 8), WINDOW), max_num_batched_tokens=12)
    engine.add("a", PROMPT, max_tokens=4)
    engine.run()
    assert engine.totals["skipped_moved_on"] == 0
    assert engine.totals["stored_bytes"] == blocks(3 + 6)
    engine.check_rest()


def test_replicas_share_nothing() -> None:
    """Two data-parallel replicas in one process: what one stored, the other computes."""
    one, other = (PlayedEngine(replica=replica) for replica in (0, 1))
    store(one, PROMPT)
    assert (one.offload.manager.slots_in_use, other.offload.manager.slots_in_use) == (5, 0)
    for engine, hit_tokens in ((other, 0), (one, 20)):
        engine.add("again", PROMPT)
        engine.run()
        assert engine.totals["hit_tokens"] == hit_tokens
        assert engine.answers["again"] == answer(PROMPT)
        engine.check_rest()


@both_ways
@pytest.mark.parametrize("groups", [(FULL,), (FULL, CacheGroup(1, 8))])
def test_blocks_of_context_parallel_ranks(
    async_scheduling: bool, groups: tuple[CacheGroup, ...]
) -> None:
    """Every second token is on the other rank: a block holds the tokens of both ranks' blocks."""
    engine = PlayedEngine(
        groups,
        ranks=2,
        context_ranks=2,
        async_scheduling=async_scheduling,
        plugin={"max_pinned_share": 1.0},
    )
    assert engine.hash_block_tokens == 2 * BLOCK
    engine.add("first", [*PROMPT, *OTHER], max_tokens=8)
    engine.run()
    assert engine.totals["stored_bytes"] == 2 * blocks(48 // 8 + 48 // 16 * (len(groups) - 1))
    forget(engine)
    engine.add("second", [*PROMPT, *OTHER], max_tokens=8)
    engine.run()
    assert engine.totals["hit_tokens"] == {1: 40, 2: 32}[len(groups)]
    assert engine.answers["second"] == engine.answers["first"]
    assert engine.answers["first"] == answer([*PROMPT, *OTHER], 8)
    engine.check_rest()


# -- states ------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_states_at_block_boundaries_are_stored_and_served(
    async_scheduling: bool, ranks: int
) -> None:
    engine = PlayedEngine((FULL, STATE), ranks=ranks, async_scheduling=async_scheduling)
    engine.add("first", PROMPT, max_tokens=1)
    engine.run()
    # Five blocks of attention, and the states at 16 (the budget of a step) and 20.
    assert engine.totals["stored_bytes"] == blocks(7) * ranks
    assert engine.totals["skipped_moved_on"] == 0
    forget(engine)
    engine.add("second", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    assert engine.totals["loaded_bytes"] == blocks(6) * ranks
    assert engine.answers["second"] == answer(PROMPT)
    engine.check_rest()


def test_a_prefix_is_served_up_to_its_last_state() -> None:
    engine = PlayedEngine((FULL, STATE))
    store(engine, PROMPT)
    engine.add("shorter", [*PROMPT[:18], 0, 0])
    engine.run()
    assert engine.totals["hit_tokens"] == 16
    assert engine.totals["loaded_bytes"] == blocks(5)
    assert engine.answers["shorter"] == answer([*PROMPT[:18], 0, 0])
    engine.check_rest()


def test_no_state_is_stored_before_its_block_is_full() -> None:
    """The block of the running state is written in place until a decode has filled it."""
    engine = PlayedEngine((FULL, STATE))
    request = engine.add("a", PROMPT[:9], max_tokens=12)
    planned = []
    states: list[int] = []
    while engine.scheduler.has_requests():
        output = engine.schedule()
        states += [] if request.is_finished() else tables(engine, request)[1][len(states) :]
        planned += [(states.index(b) + 1) * BLOCK for b in stored_blocks(output) if b in states]
        engine.execute()
        engine.run_copies()
        engine.check_host_memory()
        engine.process()
    assert planned == [8, 12, 16, 20]
    engine.run()
    engine.check_rest()


def test_attention_without_its_state_is_no_local_hit() -> None:
    """vLLM 0.26 and 0.27 would count it with a connector, and compute from no state."""
    engine = PlayedEngine((FULL, STATE))
    engine.add("first", PROMPT, max_tokens=1)
    engine.run()
    states = [
        block.block_id
        for block in engine.pool.blocks
        if block.block_hash is not None and get_group_id(block.block_hash) == 1
    ]
    assert len(states) == 2
    engine.pool.evict_blocks(set(states))
    engine.offload.manager.reset()
    engine.add("second", PROMPT)
    engine.run()
    assert engine.answers["second"] == answer(PROMPT)
    engine.check_rest()


# -- tokens that are not there yet -------------------------------------------------------------


def test_no_placeholder_of_asynchronous_scheduling_is_stored() -> None:
    """With two steps under way the scheduler counts a token as computed that nobody knows yet."""
    engine = PlayedEngine(async_scheduling=True)
    request = engine.add("a", PROMPT[:6], max_tokens=20)
    counted_too_much, planned = 0, []
    engine.schedule()
    while engine.scheduler.has_unfinished_requests():
        if len(engine.scheduled) + len(engine.executed) < 2:
            output = engine.schedule()
            scheduled = output.num_scheduled_tokens.get("a", 0)
            computed = dict(
                zip(
                    output.scheduled_cached_reqs.req_ids,
                    output.scheduled_cached_reqs.num_computed_tokens,
                    strict=True,
                )
            )
            counted_too_much += computed.get("a", 0) + scheduled > request.num_tokens
            ends = ends_of(engine, request, stored_blocks(output))
            assert all(end <= request.num_tokens for end in ends)
            planned += ends
        engine.execute()
        engine.run_copies()
        engine.process()
    assert counted_too_much > 3
    assert planned == [8, 12, 16, 20, 24]
    engine.run()
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("accepted", [True, False])
def test_no_draft_is_stored(async_scheduling: bool, accepted: bool) -> None:
    engine = PlayedEngine(drafts=3, async_scheduling=async_scheduling)
    engine.propose = engine.good_drafts if accepted else engine.bad_drafts
    request = engine.add("a", PROMPT[:6], max_tokens=24)
    counted_too_much, planned = 0, []
    while engine.scheduler.has_unfinished_requests():
        while len(engine.scheduled) + len(engine.executed) < engine.max_steps_under_way:
            output = engine.schedule()
            counted_too_much += bool(output.scheduled_spec_decode_tokens.get("a"))
            ends = ends_of(engine, request, stored_blocks(output))
            assert all(end <= request.num_tokens for end in ends)
            planned += ends
        engine.execute()
        engine.run_copies()
        engine.check_host_memory()
        engine.process()
    assert counted_too_much > 2
    assert planned == sorted(set(planned))
    engine.run()
    assert engine.answers["a"] == answer(PROMPT[:6], 24)
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("accepted", [True, False])
def test_drafts_have_no_block_looked_at_before_it_has_a_name(
    async_scheduling: bool, accepted: bool
) -> None:
    """vLLM names blocks of several groups up to a common boundary of known tokens.

    A block that was looked at before would count as one that had moved on, and never be stored.
    """
    groups = (CacheGroup(0, 4), CacheGroup(1, 8, 12))
    engine = PlayedEngine(groups, drafts=3, async_scheduling=async_scheduling, blocks=60)
    engine.propose = engine.good_drafts if accepted else engine.bad_drafts
    engine.add("a", PROMPT[:9], max_tokens=30)
    engine.run()
    assert "skipped_moved_on" not in engine.totals
    assert engine.totals["stored_bytes"] == blocks(12)
    engine.check_rest()


# -- pins --------------------------------------------------------------------------------------


@pytest.mark.skipif(not NEWER, reason="this vLLM does not ask whether blocks are about to be free")
def test_the_engine_waits_for_a_store_rather_than_preempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreBudget, "reserved_blocks", 0)
    engine = PlayedEngine(blocks=14, max_model_len=48, plugin={"max_pinned_share": 1.0})
    engine.add("gone", PROMPT, max_tokens=1)
    engine.step(3)
    assert len(pinned(engine)) == 5
    engine.add("older", OTHER[:14], max_tokens=20)
    engine.add("younger", [1, *OTHER[:11]], max_tokens=4)
    waited = 0
    for _ in range(12):
        waited += not engine.step().num_scheduled_tokens
    assert waited > 0
    assert engine.connector.has_pending_block_frees()
    assert all(r.num_preemptions == 0 for r in engine.scheduler.requests.values())
    engine.run_copies()
    engine.step(2)
    assert not engine.connector.has_pending_block_frees()
    engine.run()
    engine.check_rest()


def test_pins_keep_to_their_share_when_a_request_ends() -> None:
    engine = PlayedEngine(
        blocks=17,
        max_model_len=64,
        max_num_batched_tokens=32,
        plugin={"max_pinned_share": 0.5},
    )
    engine.add("a", (PROMPT * 3)[:60], max_tokens=1)
    for _ in range(4):
        engine.step()
        assert len(pinned(engine)) <= 0.5 * (engine.pool.num_gpu_blocks - 1)


@pytest.mark.parametrize("end", ["reported", "drained"])
def test_a_reset_fails_while_a_block_is_pinned(end: str) -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.scheduler.reset_prefix_cache() is False
    if end == "reported":
        engine.run()
    else:
        drain_engine_core(engine.core)
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.offload.manager.slots_in_use == 5
    engine.run()
    engine.check_rest()


def test_a_reset_of_the_connector_forgets_host_memory_and_what_is_on_its_way() -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    engine.add("b", OTHER, max_tokens=1)
    engine.step(3)
    assert len(pinned(engine)) > 0
    assert engine.reset(reset_connector=True)
    assert engine.offload.manager.slots_in_use == 0
    engine.add("again", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 0
    engine.check_rest()


def test_running_requests_survive_a_reset() -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=8)
    engine.step(3)
    assert engine.reset(reset_running_requests=True)
    engine.run()
    assert engine.answers["a"] == answer(PROMPT, 8)
    engine.check_rest()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_drain_that_takes_too_long_gives_the_stores_up(ranks: int) -> None:
    engine = PlayedEngine(ranks=ranks)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(3)
    engine.ranks[-1].copies.stuck = True
    assert engine.reset()
    assert engine.offload.manager.slots_in_use == 5
    engine.ranks[-1].copies.stuck = False
    engine.add("again", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 0
    assert engine.answers["again"] == answer(PROMPT)
    engine.check_rest()


@both_ways
def test_a_drain_reaches_stores_that_no_rank_has_seen(async_scheduling: bool) -> None:
    """Those of a request that has just ended, and those of a step that is under way."""
    engine = PlayedEngine(async_scheduling=async_scheduling)
    engine.add("a", PROMPT, max_tokens=6)
    for _ in range(engine.max_steps_under_way):
        engine.schedule()
    engine.abort("a")
    drain_engine_core(engine.core)
    engine.check_pins()
    assert pinned(engine) == set()
    engine.check_host_memory()
    engine.run()
    engine.check_rest()


def test_a_report_that_a_drain_has_delivered_may_arrive_again() -> None:
    engine = PlayedEngine(ranks=2)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(2)
    engine.run_copies()
    engine.schedule()
    engine.execute()  # both ranks' reports are on their way
    drain_engine_core(engine.core)
    assert pinned(engine) == set()
    engine.process()
    engine.check_pins()
    engine.run()
    assert engine.offload.manager.slots_in_use == 5
    engine.check_rest()


# -- the budget of stores ----------------------------------------------------------------------


def allow(engine: PlayedEngine, slots: int) -> None:
    """Have the link so slow that this many slots may be on their way."""
    budget = engine.offload.budget
    budget._clock = lambda: 0.0
    budget.learn((slots + 0.5) * 64 / MIN_HORIZON_SECONDS)


def test_stores_on_their_way_keep_to_what_the_link_moves_and_the_rest_follows() -> None:
    """Also of requests that have ended meanwhile; what was late is served as well."""
    engine = PlayedEngine(blocks=60, max_num_batched_tokens=64)
    allow(engine, 3)
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add(request_id, prompt, max_tokens=1)
    for step in range(200):
        if not engine.scheduler.has_requests():
            break
        engine.schedule()
        assert len(pinned(engine)) <= 3
        assert engine.offload.leftovers.slots <= 10
        engine.execute()
        if step % 3 == 2:
            engine.run_copies()
        engine.process()
    assert engine.totals["deferred_slots"] == 10 - 3
    assert engine.totals["stored_bytes"] == blocks(10)
    assert sum(n for name, n in engine.totals.items() if name.startswith("skipped")) == 0
    engine.check_rest()
    forget(engine)
    engine.add("again", OTHER)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    assert engine.answers["again"] == answer(OTHER)
    engine.check_rest()


def test_stores_recover_from_a_link_that_was_slow_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the process was stopped. A single slow store changes nothing."""
    monkeypatch.setattr("kv_offload.worker.copies.MEASURED_BYTES", blocks(2))
    engine = PlayedEngine(max_num_batched_tokens=64)
    budget, copies = engine.offload.budget, engine.ranks[0].copies
    one_slot = 1.5 * blocks(1) / MIN_HORIZON_SECONDS
    prompts = [[*map(int, f"{number:021b}"[::-1])] for number in range(1, 40)]

    def store_next(bytes_per_second: float) -> int:
        """Store one more prompt at a speed; return how many slots may be stored afterwards."""
        copies.bytes_per_second = bytes_per_second
        engine.add(f"{len(prompts)}", prompts.pop(), max_tokens=1)
        steps = 0
        while engine.scheduler.has_requests():
            engine.step(copies=True)
            steps += 1
        assert steps <= 15
        budget.next_step(load_seconds=0.0, grown_blocks=0)
        return int(budget.slots_left(0))

    assert store_next(one_slot) > 100
    for _ in range(20):
        slots = store_next(one_slot)
    assert slots == 1
    assert store_next(100 * one_slot) > 100
    engine.check_rest()


def test_what_was_deferred_and_is_gone_meanwhile_is_not_stored() -> None:
    """Its blocks are free: others take them. Nothing wrong is kept, and the loss is counted."""
    engine = PlayedEngine(blocks=8, max_model_len=28, max_num_batched_tokens=64)
    allow(engine, 1)
    engine.add("gone", PROMPT, max_tokens=1)
    while not engine.answers:
        engine.step()
    assert engine.offload.leftovers.slots == 4
    engine.add("other", OTHER, max_tokens=4)
    while len(engine.answers.get("other", ())) < 4:
        engine.step()  # the one store does not end, and keeps its pin
    engine.run()
    assert engine.totals["skipped_moved_on"] > 0
    stored = engine.totals["stored_bytes"] // blocks(1)
    assert stored + engine.totals["skipped_moved_on"] == 5 + 6
    assert engine.answers["other"] == answer(OTHER)
    engine.check_rest()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_a_paused_engine_with_one_free_block_comes_to_rest(
    async_scheduling: bool, grows: bool
) -> None:
    """What waits is looked at, and gone; or dropped, if the block is reserved for growth."""
    length = 28 if grows else 24
    max_tokens = length - 17
    engine = PlayedEngine(
        blocks=length // 4 + 2, max_num_batched_tokens=64, async_scheduling=async_scheduling
    )
    allow(engine, 1)

    def step() -> None:
        """Keep as many steps under way as the engine does; no copy ends."""
        engine.schedule()
        if len(engine.scheduled) == engine.max_steps_under_way:
            engine.execute()
            engine.process()

    engine.add("gone", PROMPT, max_tokens=1)
    while not engine.answers:
        step()
    engine.add("other", OTHER, max_tokens)
    while len(engine.answers.get("other", ())) < length - 23:
        step()
    assert engine.offload.leftovers.slots == 4
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(20):
        if not engine.scheduler.has_requests():
            break
        step()
        engine.run_copies()
    assert not engine.scheduler.has_requests(), "the engine does not come to rest"
    engine.finish_steps()
    assert engine.pool.get_num_free_blocks() == 1
    assert engine.offload.leftovers.slots == 0
    skipped = {"skipped_moved_on": 4} if not grows else {"skipped_no_budget": 4}
    assert {n: c for n, c in engine.totals.items() if n.startswith("skipped")} == skipped
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.answers["other"] == answer(OTHER, max_tokens)
    engine.check_rest()


def test_what_waits_is_kept_while_a_step_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under asynchronous scheduling a step may schedule nothing and yet a request is about to end.

    What it frees lets the others' leftovers be stored.
    """
    engine = PlayedEngine(max_num_batched_tokens=64, async_scheduling=True)
    reserved = property(lambda budget: 100 if budget.anybody_runs else 0)
    monkeypatch.setattr(StoreBudget, "reserved_blocks", reserved)  # nothing is left for stores
    engine.add("other", OTHER, max_tokens=3)
    engine.add("gone", PROMPT, max_tokens=1)
    empty_steps = 0
    while "other" not in engine.ended:
        output = engine.schedule()
        if engine.executed and not output.num_scheduled_tokens:
            empty_steps += 1
            assert not engine.offload.has_pending_stores
            assert engine.offload.leftovers.slots > 0
        engine.execute()
        if len(engine.executed) == 2:
            engine.process()
    assert empty_steps > 0
    engine.run()
    assert "skipped_no_budget" not in engine.totals
    assert engine.offload.manager.slots_in_use > 0
    engine.check_rest()


def test_a_running_request_goes_on_where_the_budget_ended() -> None:
    """In steps in which it gets no block too."""
    engine = PlayedEngine(max_num_batched_tokens=64)
    allow(engine, 2)
    engine.add("a", PROMPT[:17], max_tokens=3)
    planned = []
    for _ in range(2):
        planned.append(len(stored_blocks(engine.schedule())))
        engine.execute()
        engine.process()
    assert planned == [2, 0]
    engine.schedule()
    engine.execute()
    engine.run_copies()
    engine.process()
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(4)
    engine.check_rest()


@pytest.mark.parametrize("local_tokens", [0, 8])
@pytest.mark.parametrize("synchronous_loads", [False, True])
def test_what_was_loaded_is_not_looked_at_for_stores(
    monkeypatch: pytest.MonkeyPatch, synchronous_loads: bool, local_tokens: int
) -> None:
    """Only what the GPU had before it, and what was computed behind it."""
    engine = PlayedEngine(synchronous_loads=synchronous_loads, max_num_batched_tokens=64)
    store(engine, PROMPT)
    if local_tokens:
        engine.add("local", PROMPT[: local_tokens + 1], max_tokens=1)
        engine.run()
    monkeypatch.setattr("kv_offload.scheduler.stores.MAX_SLOTS_PER_STEP", local_tokens // BLOCK + 1)
    engine.add("a", [*PROMPT, *OTHER[:4]], max_tokens=2)
    planned = 0
    while "a" not in engine.answers:
        planned += len(stored_blocks(engine.step(copies=True)))
    assert planned == 1
    assert engine.totals["deferred_slots"] == 0
    engine.run()
    engine.check_rest()


def test_loads_come_before_stores() -> None:
    engine = PlayedEngine(blocks=60, max_num_batched_tokens=64)
    store(engine, PROMPT)
    budget = engine.offload.budget
    now = iter(range(10_000))
    budget._clock = lambda: next(now) * 0.01
    budget._step_began, budget._step_seconds = None, 0.01
    budget.learn(64 * 2.5 / 0.01 / SHARE_BESIDE_LOADS)  # two slots a step beside a long load
    loads = engine.offload.loads
    engine.offload.load_choice.queued_seconds = lambda: float(loads.running)
    engine.add("loads", PROMPT)
    engine.add("computes", OTHER * 3, max_tokens=12)
    planned = []
    for _ in range(4):
        output = engine.schedule()
        planned.append(len(stored_blocks(output)))
        engine.execute()
        engine.run_copies(Direction.STORE)
        engine.process()
    assert loads.running == 1
    assert planned == [2, 2, 2, 2]
    engine.run_copies()
    engine.step(copies=True)
    assert loads.running == 0
    assert len(stored_blocks(engine.step(copies=True))) > 2
    engine.run()
    assert engine.answers["computes"] == answer(OTHER * 3, 12)
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize(("usable_blocks", "start"), [(21, 20), (21, 23), (23, 26)])
def test_no_request_is_preempted_because_of_stores(
    monkeypatch: pytest.MonkeyPatch,
    async_scheduling: bool,
    reserve: bool,
    usable_blocks: int,
    start: int,
) -> None:
    """Two that run need nearly all blocks when a third ends, whose blocks are to be stored.

    Blocks stay free for those that run. Without that one of them is preempted: the control.
    """
    if not reserve:
        monkeypatch.setattr(StoreBudget, "reserved_blocks", 0)
    engine = PlayedEngine(
        blocks=usable_blocks + 1,
        max_model_len=64,
        max_num_seqs=3,
        async_scheduling=async_scheduling,
        plugin={"max_pinned_share": 1.0},
    )
    # Newer versions would wait for the stores rather than preempt.
    monkeypatch.setattr(engine.connector, "has_pending_block_frees", lambda: False, raising=False)
    grow = [
        engine.add("older", PROMPT[:8], max_tokens=32),
        engine.add("younger", [0, 0, *PROMPT[:6]], max_tokens=32),
    ]
    copies = engine.ranks[0].copies
    ends: dict[int, int] = {}
    for step in range(80):
        if step == start:
            engine.add("short", [1, 1, 1, *OTHER[:14]], max_tokens=1)
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.schedule()
        engine.execute()
        for job in list(copies.submitted):  # a store takes as long as the horizon allows
            if ends.setdefault(job.job_id, step + HORIZON_STEPS) == step:
                copies.run(copies.submitted.index(job))
        engine.process()
    assert len(engine.answers["short"]) == 1
    preempted = sum(request.num_preemptions for request in grow)
    assert (preempted == 0) == reserve
    engine.run()
    assert engine.answers["younger"] == answer([0, 0, *PROMPT[:6]], 32)
    engine.check_rest()


# -- loads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_rank", [0, 1])
def test_a_load_ends_when_both_ranks_have_it(first_rank: int) -> None:
    engine = PlayedEngine(ranks=2)
    store(engine, PROMPT)
    request = engine.add("a", PROMPT)
    engine.step()
    engine.ranks[first_rank].copies.run()
    engine.step(3)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.offload.loads.running == 1
    engine.ranks[1 - first_rank].copies.run()
    engine.step(2)
    assert request.status == RequestStatus.RUNNING
    engine.run()
    assert engine.answers["a"] == answer(PROMPT)
    engine.check_rest()


@pytest.mark.parametrize("first_rank", [0, 1])
def test_a_store_ends_when_both_ranks_have_it(first_rank: int) -> None:
    engine = PlayedEngine(ranks=2)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(3)
    engine.ranks[first_rank].copies.run_all()
    engine.step(2)
    held = pinned(engine)
    assert len(held) == 5
    assert engine.offload.manager.slots_in_use == 5
    engine.ranks[1 - first_rank].copies.run_all()
    engine.step(2)
    assert pinned(engine) == set()
    engine.run()
    forget(engine)
    engine.add("b", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    engine.check_rest()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_failed_on_one_rank_is_not_served(failing: int) -> None:
    engine = PlayedEngine(ranks=2)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(2)
    engine.ranks[failing].copies.run(fail=True)
    engine.run()
    assert engine.totals["skipped_copy_failed"] > 0
    engine.check_host_memory()
    forget(engine)
    engine.add("b", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 0
    assert engine.answers["b"] == answer(PROMPT)
    engine.check_rest()


def test_a_synchronous_load_is_before_the_forward_of_the_step_that_admits_its_request() -> None:
    engine = PlayedEngine(synchronous_loads=True)
    engine.add("first", PROMPT)
    engine.run()
    forget(engine)
    engine.add("second", PROMPT, max_tokens=1)
    output = engine.schedule()
    (load,) = output.kv_connector_metadata.loads
    assert load.synchronous
    assert output.num_scheduled_tokens == {"second": 1}
    assert engine.offload.has_pending_work, "its slots are held until the ranks report"
    engine.execute()
    engine.process()
    assert engine.answers["second"] == answer(PROMPT, 1)
    assert not engine.offload.has_pending_work
    engine.run()
    engine.check_rest()


def test_a_synchronous_load_keeps_its_slots_until_every_rank_has_reported() -> None:
    engine = PlayedEngine(synchronous_loads=True, ranks=2)
    engine.add("first", PROMPT)
    engine.run()
    forget(engine)
    engine.add("second", PROMPT, max_tokens=1)
    (load,) = engine.schedule().kv_connector_metadata.loads
    loads, manager = engine.offload.loads, engine.offload.manager
    loads.complete_synchronous({load.job_id: frozenset({1})})
    manager.reset()
    assert manager.slots_in_use == len(load.pairs), "a reset frees all slots but those of loads"
    loads.complete_synchronous({load.job_id: frozenset({0})})
    assert manager.slots_in_use == 0


def test_two_requests_of_one_step_share_what_was_loaded_for_the_first() -> None:
    engine = PlayedEngine(synchronous_loads=True)
    engine.add("first", PROMPT)
    engine.run()
    forget(engine)
    loaded_before = engine.totals["loaded_bytes"]
    engine.add("second", PROMPT)
    engine.add("third", PROMPT)
    engine.run()
    assert engine.answers["second"] == engine.answers["third"] == answer(PROMPT)
    assert engine.totals["loaded_bytes"] - loaded_before == blocks(5)
    engine.check_rest()


def test_only_loads_that_take_long_are_asynchronous() -> None:
    engine = PlayedEngine(synchronous_loads=True)
    engine.add("first", PROMPT)
    engine.run()
    forget(engine)
    one_slot = engine.offload.load_mode._slot_bytes
    engine.offload.watch.load_rate.learn(4.5 * one_slot / IDLE_SECONDS)  # the hit is of 5 slots
    engine.add("second", PROMPT)
    assert not engine.schedule().kv_connector_metadata.loads[0].synchronous
    engine.abort("second")
    engine.run()
    engine.offload.watch.load_rate.learn(5.5 * one_slot / IDLE_SECONDS)
    engine.add("third", PROMPT)
    assert engine.schedule().kv_connector_metadata.loads[0].synchronous
    engine.run()
    engine.check_rest()


def test_a_load_beside_others_is_synchronous_only_if_it_is_short() -> None:
    engine = PlayedEngine(blocks=80, synchronous_loads=True)
    engine.add("first", PROMPT)
    engine.run()
    forget(engine)
    one_slot = engine.offload.load_mode._slot_bytes
    engine.offload.watch.load_rate.learn(5.5 * one_slot / IDLE_SECONDS)
    engine.add("other", OTHER, max_tokens=9)
    engine.schedule()
    engine.execute()
    engine.process()
    engine.add("second", PROMPT)
    assert not engine.schedule().kv_connector_metadata.loads[0].synchronous
    engine.run()
    assert engine.answers["second"] == answer(PROMPT)
    engine.check_rest()


# -- prompts that end with a block -------------------------------------------------------------

WHOLE = PROMPT[:20]


def admit(engine: PlayedEngine, request_id: str) -> tuple[LoadJob, int]:
    """Step until a request is admitted; return its load and how many tokens are computed then."""
    jobs: list[LoadJob] = []
    for _ in range(10):
        output = engine.step(copies=True)
        jobs += output.kv_connector_metadata.loads
        if request_id in output.num_scheduled_tokens:
            (job,) = jobs
            return job, output.num_scheduled_tokens[request_id]
    raise AssertionError(f"{request_id} is not admitted")


@both_ways
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_tokens_are_loaded_and_the_last_one_is_computed_again(
    ranks: int, synchronous: bool, async_scheduling: bool
) -> None:
    engine = PlayedEngine(
        ranks=ranks, synchronous_loads=synchronous, async_scheduling=async_scheduling
    )
    store(engine, WHOLE)
    stored = engine.offload.manager.slots_in_use
    engine.add("a", WHOLE, max_tokens=2)
    job, tokens = admit(engine, "a")
    assert (job.whole, job.synchronous, len(job.pairs), tokens) == (True, synchronous, 5, 1)
    engine.run()
    assert engine.answers["a"] == answer(WHOLE, 2)
    assert engine.offload.manager.slots_in_use == stored, "nothing is stored a second time"
    engine.add("b", [*WHOLE, 0, 1], max_tokens=2)
    engine.run()
    assert engine.answers["b"] == answer([*WHOLE, 0, 1], 2), "the engine's cache has all blocks"
    engine.check_rest()


@both_ways
def test_a_load_of_all_tokens_that_fails_is_recomputed(async_scheduling: bool) -> None:
    engine = PlayedEngine(async_scheduling=async_scheduling)
    store(engine, WHOLE)
    engine.add("a", WHOLE)
    engine.schedule()
    engine.execute()
    engine.run_copies(Direction.LOAD, fail=True)
    engine.process()
    engine.run()
    assert engine.totals["failed_loads"] == 1
    assert engine.answers["a"] == answer(WHOLE)
    engine.check_rest()


def test_a_load_of_all_tokens_brings_what_the_device_lacks() -> None:
    """Not the last block alone: computing it takes no longer than it."""
    engine = PlayedEngine()
    store(engine, WHOLE)
    engine.add("first", WHOLE[:13], max_tokens=1)  # leaves three blocks on the device
    engine.run()
    engine.add("second", WHOLE)
    job, tokens = admit(engine, "second")
    assert (job.whole, len(job.pairs), tokens) == (True, 2, 1)
    engine.run()
    engine.add("third", WHOLE)
    loaded = engine.totals["loaded_bytes"]
    engine.run()
    assert engine.totals["loaded_bytes"] == loaded
    assert engine.answers["second"] == engine.answers["third"] == answer(WHOLE)
    engine.check_rest()


def test_behind_a_long_load_of_a_lone_request_its_last_slot_is_computed() -> None:
    engine = PlayedEngine(synchronous_loads=True)
    store(engine, WHOLE)
    one_slot = engine.offload.load_mode._slot_bytes
    engine.offload.watch.load_rate.learn(one_slot / WHOLE_SECONDS)
    engine.add("a", WHOLE)
    job, tokens = admit(engine, "a")
    assert (job.whole, job.synchronous, len(job.pairs), tokens) == (False, True, 4, 4)
    engine.run()
    assert engine.answers["a"] == answer(WHOLE)
    engine.check_rest()


def test_a_second_request_waits_for_the_load_of_its_prefix() -> None:
    engine = PlayedEngine()
    store(engine, PROMPT)
    engine.add("first", PROMPT)
    engine.add("second", [*PROMPT[:16], 0, 0, 0])
    engine.step(3)
    assert engine.offload.loads.running == 1
    engine.run()
    assert engine.totals["loaded_bytes"] == blocks(5)
    assert engine.answers["first"] == answer(PROMPT)
    assert engine.answers["second"] == answer([*PROMPT[:16], 0, 0, 0])
    engine.check_rest()


def test_a_follower_loads_itself_when_the_first_is_aborted() -> None:
    engine = PlayedEngine()
    store(engine, PROMPT)
    engine.add("first", PROMPT)
    engine.add("second", PROMPT)
    engine.step()
    engine.abort("first")
    engine.run()
    assert engine.totals["loaded_bytes"] == blocks(10)
    assert engine.answers["second"] == answer(PROMPT)
    engine.check_rest()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_failed_load_is_recomputed_and_not_tried_again(
    groups: tuple[CacheGroup, ...], failing: Sequence[int]
) -> None:
    engine = PlayedEngine(groups, ranks=2)
    store(engine, PROMPT)
    engine.add("a", PROMPT)
    engine.step()
    for rank in failing:
        engine.ranks[rank].copies.run(fail=True)
    engine.step(2)
    engine.run_copies()
    engine.run()
    assert engine.answers["a"] == answer(PROMPT)
    assert engine.totals["failed_loads"] == 1
    engine.add("b", PROMPT)
    engine.run()
    assert engine.totals["failed_loads"] == 1
    forget(engine)
    engine.add("c", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    assert engine.answers["c"] == answer(PROMPT)
    engine.check_rest()


@pytest.mark.parametrize(
    "groups",
    [
        (FULL,),
        pytest.param(
            (FULL, WINDOW),
            marks=pytest.mark.skipif(not NEWER, reason="refused at start by this vLLM"),
        ),
    ],
)
def test_a_failed_load_may_end_its_request(groups: tuple[CacheGroup, ...]) -> None:
    engine = PlayedEngine(groups, ranks=2, plugin={"on_load_failure": "fail"})
    store(engine, PROMPT)
    request = engine.add("a", PROMPT)
    engine.step()
    engine.ranks[0].copies.run(fail=True)
    engine.step()
    engine.run_copies()
    engine.run()
    assert request.status == RequestStatus.FINISHED_ERROR
    engine.add("b", PROMPT)
    engine.run()
    assert engine.answers["b"] == answer(PROMPT)
    engine.check_rest()


def test_a_request_that_fails_and_is_aborted_leaves_nothing() -> None:
    engine = PlayedEngine(ranks=2)
    store(engine, PROMPT)
    engine.add("a", PROMPT)
    engine.step()
    engine.ranks[0].copies.run(fail=True)
    engine.step()
    engine.abort("a")
    engine.step()
    engine.run()
    engine.check_rest()


@pytest.mark.xfail(
    not NEWER,
    strict=True,
    raises=RestlessError,
    reason="this vLLM scans a request that was told to wait before those behind it that hold "
    "loaded blocks, and stops at it when it does not fit",
)
def test_a_request_that_waited_and_does_not_fit_starves_nobody() -> None:
    """`long` waits for the load of `first`; meanwhile others load behind it and fill the pool."""
    engine = PlayedEngine(blocks=18, max_model_len=64, max_num_batched_tokens=64)
    third = [1, 1, *OTHER[:19]]
    for index, prompt in enumerate((PROMPT[:9], OTHER, third)):
        store(engine, prompt, f"stored{index}")
    engine.add("first", PROMPT[:9])
    engine.add("long", [*PROMPT[:8], *OTHER, *third], max_tokens=4)
    engine.add("other", OTHER)
    engine.add("third", third)
    engine.step()
    assert "first" in engine.offload.reports.running_loads()
    assert "long" not in engine.offload.reports.running_loads()
    engine.run()
    assert len(engine.answers["long"]) == 4
    engine.check_rest()


@pytest.mark.parametrize("replaces_resumed", [False, True], ids=["runner V1", "runner V2"])
@both_ways
def test_a_resumed_request_is_followed_to_its_new_blocks(
    replaces_resumed: bool, async_scheduling: bool
) -> None:
    """Runner V1 hears of it among the cached requests, runner V2 among the new ones."""
    engine = PlayedEngine(
        blocks=16,
        max_model_len=48,
        async_scheduling=async_scheduling,
        replaces_resumed=replaces_resumed,
    )
    requests = [
        engine.add("older", OTHER[:20], max_tokens=24),
        engine.add("younger", PROMPT[:16], max_tokens=20),
    ]
    for _ in range(200):
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.step(copies=True)
        engine.check_host_memory()
        engine.check_pins()
    assert sum(request.num_preemptions for request in requests) > 0
    assert engine.answers == {
        "older": answer(OTHER[:20], 24),
        "younger": answer(PROMPT[:16], 20),
    }
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(43 // BLOCK + 35 // BLOCK)
    engine.check_rest()


# -- figures -----------------------------------------------------------------------------------


def test_figures_of_a_round_trip() -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    store_figures = {name: value for name, value in engine.totals.items() if value}
    assert store_figures.pop("stored_seconds") > 0
    assert store_figures == {"lookup_tokens": 21, "stored_bytes": blocks(5)}
    forget(engine)
    engine.add("b", PROMPT, max_tokens=1)
    engine.run()
    load_figures = {name: value for name, value in engine.totals.items() if value}
    assert load_figures.pop("loaded_seconds") > 0
    assert load_figures == {
        "lookup_tokens": 21,
        "hit_tokens": 20,
        "loaded_bytes": blocks(5),
    }


def test_gauges_are_reported_when_they_change() -> None:
    engine = PlayedEngine(slots=7)
    assert engine.offload.take_stats().data == {
        "slots": 7,
        "slots_in_use": 0,
        "running_loads": 0,
        "running_stores": 0,
        "pinned_blocks": 0,
        "waiting_slots": 0,
        "load_bytes_per_second": 0.0,
        "prefill_tokens_per_second": 0.0,
    }
    assert engine.offload.take_stats() is None


def test_gauges_are_reported_now_and_then_while_requests_run_and_at_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(
        "kv_offload.scheduler.statistics.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    engine = PlayedEngine(slots=7)
    engine.offload.take_stats()
    engine.add("a", PROMPT, max_tokens=2)
    engine.schedule()
    assert engine.offload.take_stats().data == {"lookup_tokens": 21}, "counters are at once"
    now[0] += GAUGE_SECONDS
    assert engine.offload.take_stats().data == {
        "slots_in_use": 4,
        "running_stores": 1,
        "pinned_blocks": 4,
    }
    engine.run()
    reported = engine.offload.statistics._gauges_told
    assert reported["slots_in_use"] == 5
    assert reported["running_stores"] == reported["pinned_blocks"] == 0


def test_evictions_are_counted_once() -> None:
    engine = PlayedEngine(slots=5)
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add(request_id, prompt, max_tokens=1)
        engine.run()
    assert engine.totals["evictions"] == 5
    engine.check_rest()


def test_the_smallest_rank_decides_on_the_slots() -> None:
    engine = PlayedEngine(slots=64, ranks=2)
    assert engine.offload.manager.num_slots == 64
    engine.connector.set_xfer_handshake_metadata_pp_aware(
        {
            (0, 0): WorkerCapacity(0, 40, 40),
            (0, 1): WorkerCapacity(1, 30, 30),
            (0, 2): SimpleNamespace(),
        }
    )
    assert engine.offload.manager.num_slots == engine.offload.manager.usable_slots == 30
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})
    assert engine.offload.manager.num_slots == 30


def test_only_slots_that_are_ready_on_every_rank_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory becomes ready while the engine serves; each rank says so at the end of a step."""
    ready: dict[Any, int] = {}
    monkeypatch.setattr(
        ManualSwapEngine, "ready_slots", property(lambda made: ready.get(made, 2)), raising=True
    )
    engine = PlayedEngine(ranks=2, plugin={"max_pinned_share": 1.0})
    manager = engine.offload.manager
    assert (manager.usable_slots, manager.num_slots) == (2, 64)
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(2 * 2)
    assert engine.totals["skipped_copy_failed"] == 0
    first, second = (rank.copies for rank in engine.ranks)
    ready[first] = 40
    engine.add("b", OTHER, max_tokens=1)
    engine.run()
    assert manager.usable_slots == 2, "the other rank is not as far"
    ready[second] = 30
    engine.add("c", [*OTHER[4:], *PROMPT], max_tokens=8)
    engine.run()
    assert manager.usable_slots == 30
    assert manager.slots_in_use > 2
    manager.check_integrity()
    engine.offload.ranks_ready({0: 40, 1: 35})
    assert engine.offload.take_stats().data["slots"] == 35


def test_before_every_rank_has_spoken_no_slot_is_used() -> None:
    """A connector inside another one may never see the ranks' capacities, only their reports."""
    engine = PlayedEngine(ranks=2)
    offload = engine.offload
    offload._ready_slots.clear()
    offload.ranks_ready({1: 50})
    assert offload.manager.usable_slots == 0
    engine.add("a", PROMPT)
    engine.run()
    assert offload.manager.usable_slots == 64
    assert engine.totals["stored_bytes"] > 0


def test_a_configuration_names_the_slots_of_all_ranks() -> None:
    """The capacity that the scheduler plans with before the ranks have told theirs."""
    groups = (FULL, WINDOW)
    assert make_kv_cache_config(groups, 40).num_blocks == 40
    engine = PlayedEngine(groups, ranks=2, plugin={"cpu_bytes": 2 * 64 * 3 * 5 + 100})
    assert engine.offload.manager.num_slots == 15


def test_a_drain_hands_out_what_was_not_sent_once() -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(2)
    engine.abort("a")
    unsent, running = engine.offload.reports.begin_drain()
    assert all(isinstance(job, StoreJob) for job in unsent)
    assert {job.job_id for job in unsent} <= set(running)
    assert Counter(running).most_common(1)[0][1] == 1
    assert engine.offload.reports.begin_drain() == ((), running)
    nothing = DrainAnswer({}, frozenset(), frozenset())
    assert engine.offload.reports.end_drain(nothing) is False
    assert engine.offload.reports.begin_drain() == ((), ())
    assert engine.offload.reports.end_drain(nothing) is True


# -- anything in any order ---------------------------------------------------------------------

SHAPES = [
    (FULL,),
    (CacheGroup(0, BLOCK, 10),),
    (FULL, WINDOW),
    (CacheGroup(0, 8), CacheGroup(1, BLOCK, 6)),
    (CacheGroup(0, BLOCK, 7), CacheGroup(1, BLOCK, 13), CacheGroup(2, BLOCK)),
    (FULL, CHUNKS),
    (CacheGroup(0, BLOCK, chunk_tokens=16),),
    (FULL, STATE),
    (CacheGroup(0, BLOCK, holds_state=True), CacheGroup(1, BLOCK), CacheGroup(2, BLOCK, 6)),
]
MAX_TOKENS = 60
LINES = [(PROMPT * 3)[:MAX_TOKENS], [0, 1, 1, 0] * 15, [1] * MAX_TOKENS]
"""Random prompts begin like one of these, so that most of them share prefixes."""

plugins = st.fixed_dictionaries(
    {
        "eviction_policy": st.sampled_from(["lru", "arc"]),
        "store_blocks": st.sampled_from(["all", "all", "prompt"]),
        "store_after_uses": st.sampled_from([1, 1, 2]),
        "max_pinned_share": st.sampled_from([0.2, 0.5, 1.0]),
    }
)


class AnyOrder(RuleBasedStateMachine):
    """Random requests, steps, copies and resets; every forward checks the KV that it reads."""

    @initialize(
        groups=st.sampled_from(SHAPES),
        spare_blocks=st.sampled_from([0, 0, 4, 20]),
        slots=st.sampled_from([6, 20, 60]),
        ranks=st.integers(1, 2),
        async_scheduling=st.booleans(),
        replaces_resumed=st.booleans(),
        synchronous_loads=st.booleans(),
        drafts=st.sampled_from([0, 0, 2]),
        max_num_batched_tokens=st.sampled_from([8, 16, 64]),
        plugin=plugins,
        fail_load=st.booleans(),
    )
    def start(
        self,
        groups: tuple[CacheGroup, ...],
        spare_blocks: int,
        plugin: dict[str, Any],
        fail_load: bool,
        **arguments: Any,
    ) -> None:
        if any(group.holds_state for group in groups):
            arguments["drafts"] = 0
        if fail_load and (NEWER or len(groups) == 1):
            plugin["on_load_failure"] = "fail"
        self.engine = PlayedEngine(
            groups,
            # vLLM too starts only with room for the longest request.
            blocks=2 + sum(64 // group.block_tokens for group in groups) + spare_blocks,
            max_model_len=64,
            plugin=plugin,
            **arguments,
        )
        self.engine.propose = self.propose
        self.requests = 0

    def propose(self, tokens: Tokens) -> Tokens:
        """Draft well or badly, depending on the text."""
        good = self.engine.good_drafts(tokens)
        return good if len(tokens) % 3 else [1 - token for token in good]

    def steps_under_way(self) -> int:
        return len(self.engine.scheduled) + len(self.engine.executed)

    @precondition(lambda self: len(self.engine.scheduler.requests) < 7)
    @rule(
        line=st.sampled_from(LINES),
        shared=st.integers(1, 44),
        tail=st.lists(st.integers(0, 1), max_size=5),
        max_tokens=st.integers(1, 11),
        skips=st.sampled_from([False] * 9 + [True]),
    )
    def add(self, line: Tokens, shared: int, tail: Tokens, max_tokens: int, skips: bool) -> None:
        self.requests += 1
        self.engine.add(
            f"r{self.requests}",
            line[:shared] + tail,
            max_tokens,
            skip_reading_prefix_cache=skips,
        )

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.scheduler.requests))))

    @precondition(lambda self: self.steps_under_way() < self.engine.max_steps_under_way)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.scheduled)
    @rule()
    def execute(self) -> None:
        self.engine.execute()

    @precondition(lambda self: self.engine.executed)
    @rule()
    def process(self) -> None:
        self.engine.process()

    @rule(steps=st.integers(1, 4), copies=st.booleans())
    def step(self, steps: int, copies: bool) -> None:
        self.engine.finish_steps()
        self.engine.step(steps, copies=copies)

    @precondition(lambda self: any(rank.copies.submitted for rank in self.engine.ranks))
    @rule(data=st.data(), fail=st.sampled_from([False, False, False, True]))
    def copy(self, data: st.DataObject, fail: bool) -> None:
        busy = [rank.copies for rank in self.engine.ranks if rank.copies.submitted]
        copies = data.draw(st.sampled_from(busy))
        copies.run(data.draw(st.integers(0, len(copies.submitted) - 1)), fail=fail)

    @rule(computes=st.booleans())
    def prefer(self, computes: bool) -> None:
        """Have hits computed or loaded, as the times that were measured could."""
        self.engine.offload.load_choice.loads = lambda *_tokens, **_mode: not computes

    @rule(slots=st.sampled_from([0, 2, 1000]))
    def narrow(self, slots: int) -> None:
        """Have the link so slow that this many slots may be on their way; one of them always."""
        speed = (slots + 0.5) * 64 / MIN_HORIZON_SECONDS
        self.engine.offload.budget.learn(speed)

    @rule()
    def evict_what_is_free(self) -> None:
        """Have the engine forget blocks, as other traffic would; host memory serves them then."""
        pool = self.engine.pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0})

    @rule(stuck=st.booleans(), connector=st.booleans(), running=st.booleans())
    def reset(self, stuck: bool, connector: bool, running: bool) -> None:
        engine = self.engine
        # vLLM cannot reset what waits with loaded KV, nor what a step under way will write.
        running = running and not (
            self.steps_under_way()
            or (stuck and engine.offload.loads.running)
            or any(
                request_id in engine.offload.reports.running_loads()
                or (request.num_computed_tokens and request.status != RequestStatus.RUNNING)
                for request_id, request in engine.scheduler.requests.items()
                if not request.is_finished()
            )
        )
        for rank in engine.ranks:
            rank.copies.stuck = stuck
        must_succeed = running or not (engine.scheduler.requests or self.steps_under_way())
        done = engine.reset(reset_connector=connector, reset_running_requests=running)
        assert done or not must_succeed
        assert not engine.offload.has_pending_stores
        for rank in engine.ranks:
            rank.copies.stuck = False

    @invariant()
    def host_memory_is_right(self) -> None:
        self.engine.check_host_memory()
        self.engine.check_pins()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.engine.run()
        except RestlessError:
            if NEWER:
                raise
            return  # see test_a_request_that_waited_and_does_not_fit_starves_nobody
        # An idle engine does not step for stores that were given up; the next request's steps do.
        self.engine.step(2, copies=True)
        self.engine.check_rest()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    deadline=None,
    max_examples=100,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
