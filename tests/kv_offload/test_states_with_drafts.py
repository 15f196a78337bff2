"""States with vLLM's own scheduler while drafts are accepted and rejected, and ranks split blocks.

The model keeps states where vLLM's runners do. With drafts it keeps one after each of them, in
separate blocks, and moves the one at a block's end there once it is known which drafts are
accepted. Every state with which a step begins is checked, and every state in host memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.kv_offload.test_draft_head import HeadEngine
from tests.support.played_cases import (
    FULL,
    OTHER,
    PROMPT,
    STATE,
    both_runners,
    both_ways,
    harsh_engine,
    serve_under_pressure,
    store,
)
from tests.support.played_engine import PlayedEngine

HEAD = dataclasses.replace(FULL, sees_next_token=True)
LONG = [*PROMPT, *OTHER]


def states_in(engine: PlayedEngine) -> int:
    groups = [engine.known[key][1] for key in engine.offload.manager.readable_slots()]
    return sum(engine.groups[group_id].holds_state for group_id in groups)


@both_ways
@both_runners
@pytest.mark.parametrize("head", [FULL, HEAD], ids=["any group's", "known"])
@pytest.mark.parametrize("checkpoints", [0, 1])
def test_drafts_of_a_head(head, checkpoints):
    engine = HeadEngine(
        (head, STATE),
        blocks=34,
        slots=60,
        max_model_len=60,
        checkpoints=checkpoints,
        plugin={"max_pinned_share": 0.5},
    )
    engine.model.strict = False
    serve_under_pressure(engine)
    assert states_in(engine) > 0
    engine.rest()
    assert engine.accepted > 10
    assert engine.rejected > 10


def test_a_state_waits_for_no_proof_of_a_head_that_may_be_any_groups():
    """A prompt has one state, so no later state can prove it."""
    engine = HeadEngine((FULL, STATE))
    store(engine, PROMPT).serve("again", PROMPT)
    assert states_in(engine) == 1
    assert engine.totals["hit_tokens"] == 16


PLACES: dict[str, dict[str, Any]] = {
    "drafts of the text": {"drafts": 3},
    "states within a prefill": {"checkpoints": 1},
    "hits within a block": {"match_tokens": 2},
    "split blocks": {"ranks": 2, "context_ranks": 2, "blocks": 20},
    "split blocks with drafts": {"ranks": 2, "context_ranks": 2, "drafts": 2},
}


@both_ways
@pytest.mark.parametrize("arguments", PLACES.values(), ids=PLACES)
def test_states_in_other_places(async_scheduling, arguments):
    engine = harsh_engine(
        (FULL, STATE),
        **{
            "blocks": 34,
            "slots": 60,
            "max_model_len": 60,
            "async_scheduling": async_scheduling,
            "plugin": {"max_pinned_share": 0.5},
            **arguments,
        },
    )
    serve_under_pressure(engine)
    assert states_in(engine) > 0
    engine.rest()


def test_blocks_for_drafts_that_a_prompt_passes_hold_no_state():
    """In 0.31 they would get names if a state within the prompt is kept."""
    engine = PlayedEngine((FULL, STATE), drafts=2, checkpoints=1)
    engine.add("a", OTHER[:10], max_tokens=1)
    engine.serve("b", PROMPT[:20])
    engine.check_rest()


def test_nor_do_those_that_a_resumed_answer_passes():
    """After a preemption the answer so far is computed like a prompt."""
    engine = PlayedEngine((FULL, STATE), drafts=2, checkpoints=1)
    request = engine.add("a", PROMPT[:3], max_tokens=28)
    while request.num_tokens < 24:
        engine.step(copies=True)
    assert engine.reset(reset_running_requests=True)
    engine.rest()
    engine.check_rest()


def test_drafts_of_an_answer_run_past_the_end_of_a_block():
    """Only a prompt stops there: drafts that are cut off cost the answer more steps."""
    engine = PlayedEngine((FULL, STATE), drafts=3)
    request = engine.add("a", PROMPT, max_tokens=9)
    while not request.num_output_tokens:
        engine.step()
    assert [engine.step().total_num_scheduled_tokens for _ in range(2)] == [4, 4]
    engine.rest()


@both_ways
@pytest.mark.parametrize(("drafts", "hit"), [(0, 40), (2, 36)], ids=["no head", "a head"])
def test_a_state_that_is_kept_within_a_prefill_is_found(drafts, hit):
    """It is in the last block before the end, though with a head it is the state a block before."""
    engine = PlayedEngine(
        (HEAD if drafts else FULL, STATE),
        checkpoints=1,
        drafts=drafts,
        draft_head=bool(drafts),
        max_num_batched_tokens=64,
    )
    store(engine, LONG)
    engine.serve("again", LONG)
    engine.check_rest()
    assert engine.totals["hit_tokens"] == hit
