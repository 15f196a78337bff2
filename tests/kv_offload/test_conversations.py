"""How long returning users wait, with vLLM's own scheduler and a calculated device."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kv_offload.cache.prefix import CacheGroup
from kv_offload.scheduler.loads import decision
from tests.support.loads import set_synchronous_loads
from tests.support.simulated_engine import (
    LINK_BYTES_PER_SECOND,
    TOKEN_BYTES,
    Clock,
    SimulatedEngine,
)

BLOCK_TOKENS = 8


@dataclass(frozen=True)
class Users:
    """`count` conversations of `turns` questions each, `at_once` of them open at a time.

    Each begins with the same `system_tokens` and a separate history. Each turn adds `new_tokens`
    and an answer. The lengths of histories and answers are random, within inclusive ranges.
    """

    count: int = 32
    turns: int = 4
    at_once: int = 12
    system_tokens: int = 1024
    history_tokens: tuple[int, int] = (1000, 4000)
    new_tokens: int = 700
    answer_tokens: tuple[int, int] = (16, 112)

    @property
    def most_tokens(self) -> int:
        turn = self.new_tokens + self.answer_tokens[1]
        return self.system_tokens + self.history_tokens[1] + self.turns * turn


USERS = Users()


@dataclass
class Talk:
    """Users' waiting times, in seconds."""

    seconds: float
    """From the first question to the last token."""
    waits: list[float]
    """From every question to its first token."""
    between_tokens: list[float]
    """From every token to the next one of the same answer."""


def clock_of(patch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    patch.setattr(time, "monotonic", clock)
    patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    return clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of(monkeypatch)


@pytest.fixture(scope="module")
def limit() -> Talk:
    """The waiting times of `USERS` with an engine that loads nothing."""
    with pytest.MonkeyPatch.context() as patch:
        limit, counted = hold(clock_of(patch), USERS, "limit")
    assert not counted["loaded_bytes"]
    return limit


def converse(engine: SimulatedEngine, users: Users, seed: int) -> Talk:
    """Hold conversations to their end; a seed gives the same questions, whatever the answers.

    The order of turns is the same too, except that a conversation whose answer is unfinished is
    skipped.
    """
    random, clock = np.random.default_rng((seed, users.count)), engine.clock

    def draw(length: int) -> Any:
        return random.integers(10, 31000, length).tolist()

    def lengths(bounds: tuple[int, int], count: int) -> Any:
        return random.integers(*bounds, count, endpoint=True).tolist()

    system = draw(users.system_tokens)
    spoken = [system + draw(length) for length in lengths(users.history_tokens, users.count)]
    questions = [[draw(users.new_tokens) for _ in range(users.turns)] for _ in spoken]
    order = random.permutation(np.repeat(np.arange(users.count), users.turns)).tolist()
    answers = [lengths(users.answer_tokens, users.turns) for _ in spoken]
    whose: dict[str, int] = {}  # of the unanswered questions
    left: dict[str, int] = {}  # tokens left of their answers
    times: dict[str, list[float]] = {}  # when each question was asked, and when its tokens arrived
    while order or whose:
        while len(whose) < users.at_once:
            place = next((i for i, one in enumerate(order) if one not in whose.values()), None)
            if place is None:
                break
            one, name = order.pop(place), f"turn{seed}-{len(times)}"
            spoken[one] += questions[one].pop()
            whose[name], left[name], times[name] = one, answers[one].pop(), [clock.now]
            engine.ask(name, [*spoken[one]], left[name])
        for name, tokens in engine.pass_step().items():
            times[name].append(clock.now)
            spoken[whose[name]] += tokens
            left[name] -= len(tokens)
            if not left[name]:
                del whose[name]
    asked, *_ = times.values()
    return Talk(
        seconds=max(of_turn[-1] for of_turn in times.values()) - asked[0],
        waits=[of_turn[1] - of_turn[0] for of_turn in times.values()],
        between_tokens=[gap for of_turn in times.values() for gap in np.diff(of_turn[1:])],
    )


def hold(clock: Clock, users: Users, kind: str) -> tuple[Talk, Counter[str]]:
    """Return conversations with an engine that has measured its rates, and what it counted.

    `limit` is an engine with a GPU cache for all conversations and no host memory. `ours` has a
    cache large enough for the conversations open at a time. `apart` is the same, but loads only
    asynchronously.
    """
    in_cache = 2 * users.count if kind == "limit" else users.at_once
    engine = SimulatedEngine(
        clock,
        groups=(CacheGroup(0, BLOCK_TOKENS),),
        blocks=int(in_cache * users.most_tokens) // BLOCK_TOKENS,
        slots=2 * users.count * users.most_tokens // BLOCK_TOKENS,
        max_model_len=users.most_tokens + BLOCK_TOKENS,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
    )
    if kind == "limit":
        engine.connector.get_num_new_matched_tokens = lambda _request, _computed: (0, False)
    set_synchronous_loads(engine.offload, kind == "ours")
    converse(engine, users, 1)
    engine.totals.clear()
    return converse(engine, users, 2), engine.totals


def test_hits_are_computed_when_local_hits_would_be(clock, limit, monkeypatch):
    """What the forward hides makes the difference: without it, hits miss their step."""
    ours, counted = hold(clock, USERS, "ours")
    assert counted["synchronous_loads"] > USERS.count
    assert ours.seconds < 1.02 * limit.seconds
    assert np.mean(ours.waits) < 1.05 * np.mean(limit.waits)
    assert np.median(ours.waits) < 1.2 * np.median(limit.waits)
    assert np.percentile(ours.between_tokens, 99) < 1.02 * np.percentile(limit.between_tokens, 99)
    monkeypatch.setattr(decision, "WAVES_SHARE", 0.0)
    monkeypatch.setattr(decision, "BUSY_SHARE", 0.0)
    late, counted = hold(clock, USERS, "ours")
    assert counted["loaded_bytes"]
    assert np.median(late.waits) > 1.4 * np.median(limit.waits)


def test_nobody_waits_for_a_load_that_little_is_computed_after(clock, monkeypatch):
    talks = {"count": 24, "history_tokens": (4000, 12000), "new_tokens": 32}
    users = dataclasses.replace(USERS, **talks)
    apart, counted = hold(clock, users, "apart")
    assert counted["loaded_bytes"]
    assert not counted["synchronous_loads"]
    ours, _ = hold(clock, users, "ours")
    assert ours.seconds < 1.01 * apart.seconds
    limit = np.percentile(apart.between_tokens, 95)
    assert np.percentile(ours.between_tokens, 95) < 1.05 * limit
    monkeypatch.setattr(decision, "BUSY_SECONDS", 1.0)
    all_synchronous, _ = hold(clock, users, "ours")
    assert np.percentile(all_synchronous.between_tokens, 95) > 2 * limit


def test_prompts_that_all_hit_keep_the_link_busy(clock):
    """The GPU cache has room for a quarter of them, so loads start as others end."""
    count, tokens = 48, 4096
    engine = SimulatedEngine(
        clock,
        groups=(CacheGroup(0, BLOCK_TOKENS),),
        blocks=count * tokens // BLOCK_TOKENS // 4,
        slots=count * tokens // BLOCK_TOKENS + 64,
        max_model_len=tokens + BLOCK_TOKENS,
        max_num_batched_tokens=16384,
        max_num_seqs=64,
    )
    prompts = np.random.default_rng(0).integers(10, 30000, (count, tokens)).tolist()
    for turn in range(2):
        began = clock.now
        engine.totals.clear()
        for number, prompt in enumerate(prompts):
            engine.ask(f"{turn} {number}", prompt, 1)
        while engine.scheduler.requests:
            engine.pass_step()
    link = count * tokens * TOKEN_BYTES / LINK_BYTES_PER_SECOND
    assert engine.totals["hit_tokens"] > 0.99 * count * tokens
    assert clock.now - began < 1.1 * link
