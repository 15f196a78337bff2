"""Hits that end inside a block of a hybrid model, with vLLM's own scheduler.

vLLM keeps the state at the last hash of a prompt, inside a block. Every state and all KV with which
a step begins are checked, and every slot of host memory as far as its key covers it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.scheduler.stores import tails
from kv_offload.scheduler.stores.tails import StoreTails
from tests.kv_offload.test_draft_head import HeadEngine
from tests.support.manual_tier import disk_config
from tests.support.played_cases import (
    BLOCK,
    FULL,
    OTHER,
    PROMPT,
    STATE,
    WINDOW,
    both_runners,
    both_ways,
    forget,
    harsh_engine,
    serve_under_pressure,
    slow,
    start_load,
    store,
)
from tests.support.played_engine import PlayedEngine
from tests.support.timing import Harsh

LARGE = 2 * BLOCK
ATTENTION, STATES = CacheGroup(0, LARGE), CacheGroup(1, LARGE, holds_state=True)
HEAD = dataclasses.replace(ATTENTION, sees_next_token=True)
WHOLE, END = 2 * LARGE, 20
"""Tokens of `PROMPT` in whole blocks, and up to the last hash before its last token."""

KINDS = {
    "two groups": (ATTENTION, STATES),
    "states first": (CacheGroup(0, LARGE, holds_state=True), CacheGroup(1, LARGE)),
    "two of each": (
        ATTENTION,
        STATES,
        CacheGroup(2, LARGE),
        CacheGroup(3, LARGE, holds_state=True),
    ),
}


def engine_of(*groups: CacheGroup, **arguments: Any) -> PlayedEngine:
    return PlayedEngine(groups or (ATTENTION, STATES), match_tokens=2, **arguments)


def hit_tokens(engine: PlayedEngine, prompt: list[int]) -> int:
    """Drop the engine's cache; return how much of a prompt it loads from host memory."""
    forget(engine).serve("again", prompt)
    return int(engine.totals["hit_tokens"])


def tails_in(engine: PlayedEngine) -> int:
    """Return how many attention blocks in host memory are not full."""
    found = [engine.known[key] for key in engine.offload.manager.readable_slots()]
    attention = [(names, engine.groups[group_id]) for names, group_id in found]
    return sum(len(n) < g.block_tokens for n, g in attention if not g.holds_state)


@both_ways
@both_runners
@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS)
def test_a_prompt_is_loaded_up_to_its_last_hash(groups):
    engine = store(engine_of(*groups, blocks=60), PROMPT)
    assert hit_tokens(engine, PROMPT) == END
    assert hit_tokens(engine, [*PROMPT[:END], 0, 0, 0, 0, 0]) == END
    assert hit_tokens(engine, [*PROMPT[: END - 1], 1 - PROMPT[END - 1], *OTHER]) == WHOLE
    engine.rest()


def test_a_tail_is_stored_once():
    engine = store(engine_of(), PROMPT)
    assert tails_in(engine) == 1
    before = engine.offload.manager.readable_slots()
    assert hit_tokens(engine, PROMPT) == END
    assert engine.offload.manager.readable_slots().items() >= before.items()
    assert tails_in(engine) == 1


def test_a_tail_that_did_not_fit_packed_slots_is_not_tried_again():
    engine = engine_of()
    copies = engine.ranks[0].copies
    copies.unpackable = range(engine.pool.num_gpu_blocks)
    store(engine, PROMPT)
    refused = copies.happened["unpackable"]
    assert refused > 2, "a whole block, and a tail of two"
    store(engine, PROMPT)
    assert copies.happened["unpackable"] == refused
    assert engine.offload.manager.slots_in_use == 0


@both_ways
def test_a_tail_in_the_first_block_is_a_hit(async_scheduling):
    engine = store(engine_of(), PROMPT[:5])
    assert hit_tokens(engine, PROMPT[:5]) == 4


@both_ways
@pytest.mark.parametrize("where", ["host memory", "GPU cache"])
def test_what_is_computed_after_a_hit_inside_a_block_ends_with_the_block(where):
    """If a backend keeps the last state within a prefill, vLLM would run past that end."""
    first, second = [1] * 14, [1] * 12 + [0, 1] * 8
    engine = store(engine_of(checkpoints=1, blocks=60), first)
    if where == "host memory":
        forget(engine)
    store(engine, second)
    engine.check_host_memory()
    assert hit_tokens(engine, second) >= 3 * LARGE
    engine.rest()


def test_a_tail_is_not_named_by_the_step_that_overwrites_its_state():
    """In 0.31 the step after a prompt would name it if a state within the prompt is kept."""
    engine = engine_of(checkpoints=1, async_scheduling=True)
    engine.add("a", PROMPT[:10])
    engine.run_ahead(6)
    engine.rest()


def test_few_tokens_of_a_block_are_not_worth_a_tail(monkeypatch):
    monkeypatch.setattr(tails, "LEAST_SHARE", 1)
    engine = store(engine_of(), PROMPT)
    assert tails_in(engine) == 0
    assert hit_tokens(engine, PROMPT) == WHOLE


@both_ways
@pytest.mark.parametrize("head", [ATTENTION, HEAD], ids=["any group's", "known"])
def test_a_draft_head_has_its_proof(head):
    """One more hash is needed, because a draft head's KV depends on the next token."""
    engine = HeadEngine((head, STATES), match_tokens=2, max_model_len=60)
    engine.model.strict = False
    store(engine, PROMPT)
    assert hit_tokens(engine, PROMPT) == END - 2
    assert hit_tokens(engine, [*PROMPT[: END - 2], 1 - PROMPT[END - 2], *OTHER]) <= LARGE
    engine.rest()


def test_a_proof_at_the_end_of_a_block_has_the_whole_block():
    """Its key is that of the whole block, and the step after the tail computes one token of two."""
    one = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    engine = HeadEngine((HEAD, STATES), match_tokens=2, timing=Harsh(eager=True), **one)
    store(engine, PROMPT[: WHOLE + 1])
    engine.rest()


def test_a_proof_at_the_end_of_a_block_waits_for_all_modules():
    """vLLM names a block for three modules once two tokens after it are computed."""
    modules = {"drafts": 3, "draft_head": True, "modules": 3}
    engine = PlayedEngine((HEAD, STATES), match_tokens=4, max_model_len=60, **modules)
    text = [*PROMPT, *OTHER]
    store(engine, text[: 3 * LARGE])
    assert hit_tokens(engine, text[:30]) == 0


SMALL: dict[str, Any] = {
    "match_tokens": 2,
    "blocks": 20,
    "slots": 60,
    "max_model_len": 60,
    "plugin": {"max_pinned_share": 0.5},
}
PRESSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts of the text": {"drafts": 3},
    "states within a prefill": {"checkpoints": 1},
    "two ranks": {"ranks": 2},
}


@both_ways
@pytest.mark.parametrize("arguments", PRESSED.values(), ids=PRESSED)
def test_preemptions_and_aborts(arguments):
    engine = harsh_engine(
        (ATTENTION, STATES),
        **SMALL,
        **arguments,
    )
    serve_under_pressure(engine)
    assert tails_in(engine) > 0
    engine.rest()


@both_runners
@pytest.mark.parametrize("head", [ATTENTION, HEAD], ids=["any group's", "known"])
def test_drafts_that_are_rejected(head):
    engine = HeadEngine(
        (head, STATES),
        async_scheduling=True,
        **SMALL,
    )
    engine.model.strict = False
    serve_under_pressure(engine)
    assert tails_in(engine) > 0
    engine.rest()
    assert engine.rejected > 10


@both_ways
def test_a_request_that_ends_where_its_state_is_leaves_its_tail(async_scheduling):
    engine = engine_of()
    request = engine.add("a", PROMPT)
    while request.num_computed_tokens < END:
        engine.step(copies=True)
    assert request.num_computed_tokens == END
    engine.abort("a")
    engine.run()
    assert tails_in(engine) == 1
    assert hit_tokens(engine, PROMPT) == END


def test_a_tail_needs_the_states_of_all_groups():
    """Otherwise the next request would continue from a state that was never kept."""
    engine = engine_of(*KINDS["two of each"], blocks=60)
    register = engine.connector.register_finished_partial_tail

    def register_one(request: Any, block_ids: Any, states: Any) -> bool:
        assert len(states) == 2
        return bool(register(request, block_ids, states[:1]))

    engine.connector.register_finished_partial_tail = register_one
    request = engine.add("a", PROMPT)
    while request.num_computed_tokens < END:
        engine.step(copies=True)
    engine.abort("a")
    engine.run()
    assert tails_in(engine) == 0
    assert hit_tokens(engine, PROMPT) == WHOLE


def test_a_request_that_ends_before_it_has_run_leaves_nothing():
    engine = store(engine_of(), PROMPT)
    request = engine.add("a", PROMPT)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.offload.manager.reset()
    engine.abort("a")
    engine.rest()
    assert tails_in(engine) == 0


@both_ways
def test_a_load_of_a_tail_that_fails_is_computed(async_scheduling):
    engine = store(engine_of(), PROMPT)
    start_load(engine)
    engine.run_copies(fail=True)
    engine.run()
    assert engine.totals["failed_loads"] == 1
    engine.rest()


def test_requests_with_the_same_tail_wait_for_one_load():
    engine = store(engine_of(), PROMPT)
    start_load(engine, "a")
    engine.add("b", PROMPT)
    engine.step(2)
    assert engine.offload.gauges()["running_loads"] == 1
    engine.run()
    assert engine.totals["hit_tokens"] == END
    engine.rest()


@pytest.mark.parametrize("tokens", [END - 1, END + 1], ids=["shorter", "as long"])
def test_the_longer_of_two_hits_inside_a_block_wins(tokens):
    engine = store(engine_of(), PROMPT)
    engine.serve("in the engine's own cache", PROMPT[:tokens])
    engine.totals.clear()
    engine.serve("again", PROMPT)
    assert engine.totals["hit_tokens"] == (END - WHOLE if tokens < END else 0)
    engine.rest()


def test_hints_are_heeded():
    engine = engine_of()
    hints = {"kv_transfer_params": {"kv_offload": {"store": False}}}
    engine.serve("not stored", PROMPT, 1, extra_args=hints)
    assert not engine.offload.manager.readable_slots()
    forget(engine)
    hints = {"kv_transfer_params": {"kv_offload": {"retain_seconds": 600}}}
    engine.serve("retained", PROMPT, 1, extra_args=hints)
    assert tails_in(engine) == 1
    stored = len(engine.offload.manager.readable_slots())
    assert engine.offload.gauges()["retained_slots"] == stored


def test_a_tail_is_stored_as_a_whole_or_not_at_all():
    engine = slow(1, groups=(ATTENTION, STATES), match_tokens=2)
    engine.serve("stored", PROMPT, 1)
    assert tails_in(engine) == 0
    assert engine.totals["skipped_no_budget"] == 2
    assert hit_tokens(engine, PROMPT) == WHOLE


def test_routers_know_tails_by_their_hashes():
    engine = engine_of(events=True)
    engine.serve("stored", PROMPT, 1)
    assert engine.reset()
    engine.serve("again", PROMPT)
    assert engine.totals["hit_tokens"] == END
    engine.rest()
    assert all(router.without_tokens for router in engine.routers)


def test_routers_take_no_tail_for_the_block_whose_slot_it_got():
    """Routers are compared with host memory after every step."""
    engine = engine_of(events=True, slots=8)
    for number in range(8):
        engine.serve(f"{number}", [*map(int, f"{number:04b}"), *PROMPT[:15]], 1)
        assert tails_in(engine) > 0
    assert engine.offload.manager.evictions > 0
    engine.rest()


def test_a_tail_comes_back_from_a_disk(tmp_path: Path):
    engine = store(engine_of(plugin=disk_config(tmp_path)), PROMPT)
    engine.offload.manager.reset()
    assert hit_tokens(engine, PROMPT) == END
    engine.rest()
    engine.connector.shutdown()


def test_a_shorter_request_does_not_wait_for_a_tail_that_is_read(tmp_path: Path):
    """It shares the whole blocks of the read, and has no hash where the read ends."""
    engine = store(engine_of(plugin=disk_config(tmp_path)), PROMPT)
    engine.offload.manager.reset()
    (tier,) = engine.ranks[0].tiers
    tier.stuck = True
    engine.add("reads", PROMPT)
    engine.add("shorter", PROMPT[: END - 2])
    engine.step(2)
    tier.stuck = False
    engine.rest()
    assert engine.totals["hit_tokens"] == END + WHOLE
    assert engine.totals["hook_errors"] == 0
    engine.connector.shutdown()


@both_ways
def test_a_hit_in_a_block_that_the_step_computes_waits_for_the_next_step():
    """vLLM copies the block before the forward, but hashes it as soon as the step is planned."""
    hints = {"extra_args": {"kv_transfer_params": {"kv_offload": {"store": False, "load": False}}}}
    engine = store(PlayedEngine((FULL, STATE), match_tokens=2, blocks=60), PROMPT[: 2 * BLOCK + 1])
    loaded = engine.add("loaded", PROMPT)
    engine.step()
    engine.add("with a state inside the next block", PROMPT[: 2 * BLOCK + 3], 1, **hints)
    engine.step(4)
    engine.run_copies()
    engine.step()
    copied = engine.add("copied", PROMPT[: 3 * BLOCK + 3], **hints)
    engine.step()
    assert loaded.num_computed_tokens >= 3 * BLOCK
    assert copied.status == RequestStatus.WAITING
    assert engine.step().kv_cache_block_copies
    engine.rest()
    assert engine.totals["hit_tokens"] == 2 * BLOCK


@both_ways
def test_a_hit_does_not_wait_for_a_long_prompt_that_is_far_from_its_block():
    """Nor do the requests after it, which vLLM would not look at either."""
    engine = engine_of(blocks=100, max_num_batched_tokens=LARGE + BLOCK)
    text = [*PROMPT, *OTHER]
    engine.serve("warm", text[:37], 1)
    alone = engine.add("alone", [*text, 1, 1], 1, skip_reading_prefix_cache=True)
    engine.step()
    hit = engine.add("hit", [*text[:36], 1, 0, 1, 0, 1], 1)
    engine.step()
    assert alone.num_computed_tokens == 2 * LARGE
    assert hit.num_computed_tokens == 40
    engine.rest()


def test_a_tail_that_the_engine_has_itself_is_not_waited_for(tmp_path: Path):
    """vLLM asks what follows the whole blocks of its own hit, and uses the longer one."""
    engine = engine_of(plugin=disk_config(tmp_path))
    engine.serve("stored", PROMPT, 1)
    engine.offload.manager.reset()
    (tier,) = engine.ranks[0].tiers
    tier.stuck = True
    request = engine.add("again", PROMPT)
    engine.step()
    assert request.num_computed_tokens == len(PROMPT)
    tier.stuck = False
    engine.rest()
    engine.connector.shutdown()


@pytest.mark.parametrize(
    ("groups", "arguments"),
    [
        ((FULL,), {}),
        ((FULL, STATE), {}),
        ((FULL, WINDOW), {}),
        ((ATTENTION, STATES, CacheGroup(2, 2, 6)), {"match_tokens": 2, "blocks": 60}),
        ((FULL, STATE), {"match_tokens": 2, "ranks": 2, "context_ranks": 2}),
    ],
    ids=["attention", "states", "windows", "states and windows", "split blocks"],
)
def test_other_models_do_nothing_for_tails(groups, arguments, monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("this is done for tails alone")

    monkeypatch.setattr(PrefixMap, "_tail_end", refuse)
    monkeypatch.setattr(StoreTails, "_collect", refuse)
    engine = store(PlayedEngine(groups, **arguments), PROMPT)
    engine.serve("again", PROMPT)
    assert engine.totals["hit_tokens"] >= WHOLE
    assert engine.totals["hook_errors"] == 0
