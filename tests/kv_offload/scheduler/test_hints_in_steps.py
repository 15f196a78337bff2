"""What requests say in `kv_transfer_params`, on vLLM's scheduler, and stores that are paused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from kv_offload.cache.retention import Retention
from tests.support.played_cases import (
    BLOCK,
    FULL,
    OTHER,
    PROMPT,
    STATE,
    WINDOW,
    forget,
    slow,
    store,
)
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import answer

FILLERS = [[(number >> bit) & 1 for bit in range(8)] * 3 for number in range(16)]
"""Prompts of six blocks, of which the first are different."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch(
        "kv_offload.scheduler.core.Retention", lambda *arguments: Retention(*arguments, clock)
    ):
        yield clock


def says(**hints: Any) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"kv_offload": hints}}}


def serve(
    engine: PlayedEngine, name: str, prompt: list[int], *, salt: str | None = None, **hints: Any
) -> None:
    engine.serve(name, prompt, 1, cache_salt=salt, **says(**hints))
    engine.check_pins()


def retained(engine: PlayedEngine) -> float:
    return float(engine.offload.gauges()["retained_slots"])


def press(engine: PlayedEngine, name: str = "filler") -> None:
    """Serve another tenant's prompts, more than host memory has room for."""
    for number, prompt in enumerate(FILLERS):
        engine.serve(f"{name} {number}", prompt, 1, cache_salt="another tenant")
        engine.check_pins()
    forget(engine)


def hits(engine: PlayedEngine, prompt: list[int] = PROMPT, salt: str | None = None) -> float:
    """Return how many tokens of a prompt host memory brings; the engine has none."""
    forget(engine)
    engine.serve("asks", prompt, 1, cache_salt=salt)
    found = engine.totals["hit_tokens"]
    forget(engine)
    return found


GROUPS = pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)], ids=["full", "window", "state"]
)


@GROUPS
def test_a_request_that_must_not_be_stored_leaves_nothing(groups):
    engine = PlayedEngine(groups, async_scheduling=True)
    serve(engine, "secret", PROMPT, store=False)
    assert engine.offload.manager.slots_in_use == 0
    assert engine.totals["stored_bytes"] == 0
    named = {1: 5, 2: 10}[len(groups)] if groups[-1] is not STATE else 5
    assert engine.totals["skipped_not_wanted"] == named
    assert engine.totals["requests_with_hints"] == 1
    forget(engine)
    engine.serve("open", PROMPT, 1)
    assert engine.offload.manager.slots_in_use > 0
    engine.rest()


def test_what_it_loads_is_not_counted_as_unwanted():
    engine = store(PlayedEngine(), PROMPT[: 2 * BLOCK + 1])
    serve(engine, "secret", PROMPT, store=False)
    assert engine.totals["hit_tokens"] == 2 * BLOCK
    assert engine.totals["skipped_not_wanted"] == 3
    engine.rest()


@pytest.mark.parametrize(("most", "loaded"), [(3, 0), (4, 4), (11, 8), (20, 20), (999, 20)])
@GROUPS
def test_a_request_loads_no_more_than_it_wishes(groups, most, loaded):
    engine = store(PlayedEngine(groups), PROMPT)
    engine.add("a", PROMPT, **says(max_load_tokens=most))
    engine.run()
    if groups[-1] is STATE:
        assert engine.totals["hit_tokens"] <= loaded
    else:
        assert engine.totals["hit_tokens"] == loaded
    assert engine.answers["a"] == answer(PROMPT)
    engine.rest()


def test_hints_that_came_past_the_front_end_are_ignored_and_counted(monkeypatch):
    warned: list[str] = []
    monkeypatch.setattr(
        "kv_offload.scheduler.request.logger.warning", lambda text, *a: warned.append(text % a)
    )
    engine = PlayedEngine()
    for number in range(3):
        serve(engine, f"wrong {number}", PROMPT, store="no", retain_seconds=5)
    assert engine.totals["ignored_hints"] == 3
    assert engine.totals["requests_with_hints"] == 0
    (message,) = warned
    assert "kv_offload.store: 'no' is not allowed. Give true or false" in message
    assert hits(engine) == 20
    engine.rest()


@GROUPS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_retained_prompt_outlives_pressure_for_its_time(groups, asynchronous, clock):
    engine = PlayedEngine(groups, slots=48, async_scheduling=asynchronous)
    serve(engine, "retained", PROMPT, retain_seconds=60)
    serve(engine, "not retained", OTHER)
    assert retained(engine) > 0
    press(engine)
    assert hits(engine, OTHER) == 0
    assert hits(engine) == 20
    press(engine)
    clock.now += 61
    press(engine)
    assert retained(engine) == 0
    assert hits(engine) == 0
    engine.rest()


def test_what_is_loaded_is_retained_from_then_on(clock):
    engine = store(PlayedEngine(slots=48), PROMPT)
    serve(engine, "loads", PROMPT, retain_seconds=60)
    assert engine.totals["hit_tokens"] == 20
    assert retained(engine) == 5
    forget(engine)
    clock.now += 50
    serve(engine, "again", PROMPT, retain_seconds=60)
    clock.now += 50
    press(engine)
    assert hits(engine) == 20


@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)], ids=["full", "window", "state"]
)
def test_while_stores_are_paused_a_use_still_begins_the_time_anew(clock, groups):
    """The engine has the prompt itself, so nothing is loaded either."""
    engine = PlayedEngine(groups)
    serve(engine, "first", PROMPT, retain_seconds=60)
    kept = retained(engine)
    assert kept >= 5
    engine.offload.pause_stores(paused=True)
    clock.now += 50
    serve(engine, "again", PROMPT, retain_seconds=60)
    clock.now += 50
    serve(engine, "without a wish", PROMPT)
    assert retained(engine) == kept
    clock.now += 20
    engine.serve("other", OTHER, 1)
    assert retained(engine) == 0


def test_leftovers_of_a_retained_request_are_retained(clock):
    engine = slow(1)
    engine.add("a", PROMPT, 1, **says(retain_seconds=60))
    engine.step()
    assert retained(engine) == 0
    engine.run()
    assert engine.totals["deferred_slots"] > 0
    assert retained(engine) == 5


def test_a_reset_ends_retention(clock):
    engine = PlayedEngine(slots=48)
    serve(engine, "a", PROMPT, retain_seconds=600)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    engine.check_pins()
    assert retained(engine) == 0
    assert engine.offload.manager.slots_in_use == 0
    assert hits(engine) == 0
    engine.rest()


def test_while_stores_are_paused_nothing_is_stored_and_what_is_there_is_loaded():
    engine = store(PlayedEngine(async_scheduling=True), PROMPT)
    engine.offload.pause_stores(paused=True)
    stored = engine.offload.manager.slots_in_use
    engine.serve("other", OTHER, 1)
    assert engine.offload.manager.slots_in_use == stored
    assert engine.totals["skipped_paused"] == 5
    assert engine.gauges["stores_paused"] == 1
    assert hits(engine) == 20
    engine.offload.resets.reset_cache()
    engine.serve("still paused", OTHER, 1)
    assert engine.offload.manager.slots_in_use == 0
    forget(engine)
    engine.offload.pause_stores(paused=False)
    engine.serve("resumed", OTHER, 1)
    assert engine.offload.gauges()["stores_paused"] == 0
    assert hits(engine, OTHER) == 20
    engine.rest()


def test_a_request_that_runs_on_is_stored_after_the_pause():
    engine = PlayedEngine()
    engine.offload.pause_stores(paused=True)
    engine.add("a", PROMPT, max_tokens=12)
    engine.step(3, copies=True)
    engine.offload.pause_stores(paused=False)
    engine.run()
    assert hits(engine) == 20


def test_a_pause_lets_go_of_what_waits_to_be_stored():
    engine = slow(1)
    engine.add("a", PROMPT, 1)
    engine.step(2)
    assert engine.offload.gauges()["waiting_slots"] > 0
    engine.offload.pause_stores(paused=True)
    assert engine.offload.gauges()["waiting_slots"] == 0
    engine.rest()


def test_a_routers_hints_are_followed_as_those_of_a_client(clock):
    """In the place where Dynamo puts them; nonsense is counted, and its request is served."""
    engine = PlayedEngine(slots=32)

    def ask(name: str, prompt: list[int], *actions: Any) -> None:
        hint = {"protocol_version": "0.1", "message_id": name, "actions": list(actions)}
        params = {"kv_transfer_params": {"kv_hint": hint}}
        engine.serve(name, prompt, 1, extra_args=params)

    version = {"action_id": "a", "action_version": "1.0"}
    retain = {"action_type": "kv.retain", "payload": {"ttl_seconds": 60, "priority": 1}, **version}
    ask("retains", PROMPT, retain, {**retain, "payload": "nonsense"})
    assert retained(engine) == len(PROMPT) // BLOCK
    ask("ends", OTHER, {"action_type": "kv.evict", "payload": {}, **version})
    assert engine.totals["skipped_not_wanted"] > 0
    assert (engine.totals["followed_kv_hints"], engine.totals["ignored_kv_hints"]) == (2, 1)
    clock.now += 61
    engine.serve("later", OTHER, 1)
    assert retained(engine) == 0
