"""Sessions whose prompt grows, as in vLLM's streaming input: one request of several parts.

A session keeps its blocks between two parts, and a later part is not looked up unless the model has
states, or rings and drafts. The session keeps the computed part of an answer, usually all but the
last token.
"""

from __future__ import annotations

from typing import Any

import pytest
from kv_swap.engine import Direction

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm import requests
from tests.support.configurations import make_request
from tests.support.played_cases import (
    FULL,
    OTHER,
    PROMPT,
    RING,
    STATE,
    WINDOW,
    both_runners,
    both_ways,
    forget,
    store,
)
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.engine

ATTENTION, STATE_OF_8 = CacheGroup(0, 8), CacheGroup(1, 8, holds_state=True)

both_kinds = pytest.mark.parametrize("drafts", [0, 2], ids=["", "drafts"])


@both_ways
@both_runners
@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)], ids=["full", "window", "state"]
)
def test_all_parts_are_stored(groups):
    """The played model checks what each part reads, and the engine what each slot holds."""
    engine = PlayedEngine(groups, blocks=60)
    parts = [1, 0, 1, 1, 0], [0, 0, 1], [1] * 21, [0, 1]
    session = engine.stream("session", *((part, 3) for part in parts))
    engine.run()
    text = list(session.all_token_ids)
    assert len(text) > sum(map(len, parts))
    forget(engine)
    engine.serve("same", [*text, 0, 1, 0])
    assert engine.totals["hit_tokens"] == (len(text) - 1) // 4 * 4
    engine.check_rest()


STATES: dict[str, dict[str, Any]] = {
    "drafts": {"drafts": 3},
    "drafts in the first block": {"drafts": 2, "match_tokens": 2},
    "states within a prefill": {"drafts": 3, "checkpoints": 1},
    "a step under way": {"async_scheduling": True},
    "a ring": {"groups": (FULL, RING), "drafts": 3, "async_scheduling": True},
}


@both_runners
@pytest.mark.parametrize("arguments", STATES.values(), ids=STATES)
@pytest.mark.parametrize("last", [0, 1])
def test_states_are_those_of_what_a_session_keeps(arguments, last):
    """Drafts and steps in flight write states and rings after the token that ends an answer."""
    engine = PlayedEngine(**{"groups": (ATTENTION, STATE_OF_8), "blocks": 60, **arguments})
    for number in range(1, 7):
        parts = PROMPT[:13], [1, 0] * 7, [number % 2], [0, 1, 1]
        session = engine.stream(
            f"{number}", *((part, number) for part in parts), stop_token_ids=[last]
        )
        engine.run_ahead(50)
        assert session.is_finished()
        engine.serve(f"same {number}", list(session.all_token_ids))
    forget(engine).serve("loads", list(session.all_token_ids))
    assert engine.totals["hit_tokens"] >= 8
    engine.rest()


@both_ways
def test_a_session_is_loaded_while_nothing_else_runs():
    """Runner V1 does not notice preemptions in a step without tokens, as before a load."""
    engine = store(PlayedEngine((FULL, STATE), blocks=60), PROMPT)
    engine.stream("session", (PROMPT[:5], 1), (PROMPT[5:], 3))
    engine.run()
    assert engine.totals["hit_tokens"] >= 8
    engine.check_rest()


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, RING)], ids=["window", "ring"])
def test_a_session_keeps_its_blocks_where_nothing_in_them_is_lost(groups):
    """Without drafts, a step in flight does not overwrite needed parts of a ring."""
    engine = PlayedEngine(groups, blocks=60, async_scheduling=True)
    engine.stream("session", (PROMPT[:5], 1), (PROMPT[5:], 8))
    while engine.scheduler.has_requests():
        engine.step(copies=True)
        assert not engine.connector.restarted_sessions
    engine.rest()


@pytest.mark.parametrize("ends", ["while it waits", "after its last part"])
def test_a_session_has_given_its_blocks_back_until_it_is_scheduled_or_ends(ends):
    """The next session of its name is a different one."""
    engine = PlayedEngine((FULL, STATE), blocks=60)
    session = engine.stream("session", (PROMPT[:5], 1), (PROMPT[5:], 8))
    restarted = engine.connector.restarted_sessions
    while not restarted and engine.scheduler.has_requests():
        engine.step(copies=True)
    assert restarted == {"session"}
    if ends == "while it waits":
        engine.abort("session")
    else:
        engine.step(2, copies=True)
        assert not session.is_finished()
    assert not restarted
    engine.rest()


@both_ways
def test_a_session_waits_to_be_looked_up_while_nothing_else_runs(monkeypatch):
    engine = PlayedEngine((FULL, STATE), blocks=60)
    match, asked = engine.connector.get_num_new_matched_tokens, []

    def ask_again_once(request: Any, computed: int) -> tuple[int | None, bool]:
        asked.append(computed)
        return (None, False) if len(asked) == 2 else match(request, computed)

    monkeypatch.setattr(engine.connector, "get_num_new_matched_tokens", ask_again_once)
    engine.stream("session", (PROMPT[:13], 6), (PROMPT[:2], 3))
    engine.run()
    assert len(asked) == 3
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("blocks", [18, 19])
def test_a_session_without_blocks_does_not_hold_up_a_loaded_prompt(monkeypatch, blocks):
    """vLLM goes through requests that have blocks, up to the first without room.

    Another connector may have loaded the prompt, for which the plugin makes no room.
    """
    monkeypatch.setattr(requests, "make_room", lambda *_: None)
    engine = PlayedEngine((FULL, STATE), blocks=blocks)
    store(engine, PROMPT, "prompt")
    store(engine, OTHER, "other")
    engine.add("session", OTHER[:5], 1, resumable=True)
    engine.step(3, copies=True)
    loads = engine.add("loads", [*PROMPT[:20], *[1, 0] * 10], 1)
    engine.step()
    assert loads.status.name == "WAITING_FOR_REMOTE_KVS"
    size = engine.hash_block_tokens
    for part in (OTHER[5:21], True), ([1], False):
        engine.scheduler.add_request(make_request("session", part[0], size, 1, resumable=part[1]))
    engine.rest()
    assert engine.ended["loads"] == "length"


def test_a_session_that_was_preempted_is_loaded_with_its_new_part():
    """Runner V1 gets the whole prompt of a request, unless it resumes after a preemption."""
    engine = PlayedEngine((FULL, STATE), blocks=60)
    parts = (PROMPT[:5], 6), (PROMPT, 2)
    engine.stream("stored", *parts)
    engine.run()
    forget(engine)
    engine.stream("again", *parts)
    engine.step(3, copies=True)
    assert engine.reset(reset_running_requests=True)
    engine.rest()
    assert engine.answers["again"] == engine.answers["stored"]
    assert engine.totals["hit_tokens"] >= 16


@both_ways
@both_kinds
@pytest.mark.parametrize("number", range(1, 8))
def test_nobody_gets_the_kv_of_what_came_in_place_of_a_dropped_token(number, drafts):
    """The token may fill a block, which may be named by it; and drafts may follow it."""
    engine = PlayedEngine(drafts=drafts, blocks=60)
    prompt = [1, 0, 1, 1, 0]
    (dropped,) = engine.serve("answer", prompt, number) and engine.answers["answer"][-1:]
    forget(engine)
    engine.stream("session", (prompt, number), ([1 - dropped] * 6, 2))
    engine.run()
    for loads in (False, True):
        if loads:
            forget(engine)
        engine.serve(f"same {loads}", [*prompt, *engine.answers["answer"], 1, 0, 1, 1])
    engine.check_rest()


@both_ways
def test_what_was_loaded_gives_way_to_a_session_that_keeps_its_blocks():
    """It waits before the session, whose next part needs a block that the loaded prompt has."""
    engine = store(PlayedEngine(blocks=14), PROMPT)
    engine.stream("session", ([1] * 4, 26), ([0] * 7, 1))
    engine.step(4)
    engine.add("loads", [*PROMPT, 1, 1, 1, 1, 1, 1, 1], 1)
    engine.step(19)
    engine.run_copies(Direction.LOAD)
    engine.rest()
    assert engine.ended["loads"] == engine.ended["session"] == "length"
    assert engine.totals["hit_tokens"] > 20, "it has given its blocks back, and loads again"
