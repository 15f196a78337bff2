"""How long users who come back wait, with vLLM's own scheduler and a calculated device.

A bench measures it on a GPU: `python -m bench.serving --sections conversations`.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.cache.prefix import CacheGroup
from kv_offload.scheduler import loads
from tests.support.simulated_engine import Clock, SimulatedEngine

pytestmark = pytest.mark.filterwarnings("default")

KINDS = ("limit", "ours", "apart")
"""An engine with a GPU cache for all conversations and no host memory. One of ours, whose cache is
large enough for those that are open at a time; and such a one that loads asynchronously alone."""

BLOCK_TOKENS = 8
COUNT, TURNS, AT_ONCE = 40, 5, 12
SYSTEM_TOKENS = 1024
ANSWER_TOKENS = (16, 112)


@dataclass(frozen=True)
class Users:
    """`COUNT` conversations, each with a history and questions of these lengths in tokens."""

    history: tuple[int, int] = (1000, 4000)
    question: int = 700

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return SYSTEM_TOKENS + self.history[1] + TURNS * (self.question + ANSWER_TOKENS[1])


@dataclass
class Waits:
    """In seconds."""

    total: float
    first: list[float]
    between: list[float]

    @property
    def mean(self) -> float:
        """To first token."""
        return statistics.mean(self.first)

    @property
    def median(self) -> float:
        """To first token."""
        return statistics.median(self.first)

    def between_tokens(self, percent: int) -> float:
        """A percentile of the times from token to token."""
        return float(np.percentile(self.between, percent))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    return clock


def converse(engine: SimulatedEngine, users: Users, seed: int) -> Waits:
    """Hold conversations in random order, `AT_ONCE` open at a time."""
    random, clock = np.random.default_rng(seed), engine.clock

    def draw(length: int) -> list[int]:
        tokens: list[int] = random.integers(0, 1000, length).tolist()
        return tokens

    system = draw(SYSTEM_TOKENS)
    spoken = [system + draw(int(length)) for length in random.integers(*users.history, COUNT)]
    order = random.permutation(np.repeat(np.arange(COUNT), TURNS)).tolist()
    whose: dict[str, int] = {}
    last: dict[str, float] = {}
    wanted: dict[str, int] = {}
    waits = Waits(clock.now, [], [])
    while order or whose:
        while len(whose) < AT_ONCE:
            place = next((i for i, one in enumerate(order) if one not in whose.values()), None)
            if place is None:
                break
            name, one = f"{seed}-{len(order)}", order.pop(place)
            spoken[one] += draw(users.question)
            whose[name], last[name] = one, clock.now
            wanted[name] = int(random.integers(*ANSWER_TOKENS))
            engine.ask(name, spoken[one], wanted[name])
        had = {name: len(engine.answers.get(name, ())) for name in whose}
        engine.pass_step()
        for name, before in had.items():
            answer = engine.answers.get(name, [])
            if len(answer) > before:
                (waits.between if before else waits.first).append(clock.now - last[name])
                last[name] = clock.now
            if len(answer) == wanted[name]:
                spoken[whose.pop(name)] += answer
    waits.total = clock.now - waits.total
    return waits


def hold(clock: Clock, users: Users, kind: str) -> tuple[Waits, Counter[str]]:
    """Return the waits of an engine that knows its rates, and what it counted."""
    conversations = 2 * COUNT if kind == "limit" else AT_ONCE
    engine = SimulatedEngine(
        clock,
        groups=(CacheGroup(0, BLOCK_TOKENS),),
        blocks=conversations * users.longest // BLOCK_TOKENS,
        slots=2 * COUNT * users.longest // BLOCK_TOKENS,
        max_model_len=users.longest + BLOCK_TOKENS,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
    )
    if kind == "limit":
        engine.connector.get_num_new_matched_tokens = lambda _request, _computed: (0, False)
    engine.offload.load_mode.allowed = kind == "ours"
    converse(engine, users, 1)
    engine.totals.clear()
    return converse(engine, users, 2), engine.totals


def test_hits_are_computed_when_local_hits_would_be(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the forward hides makes the difference: without it, hits miss their step."""
    users = Users()
    limit, counted = hold(clock, users, "limit")
    assert not counted["loaded_bytes"]
    ours, counted = hold(clock, users, "ours")
    assert counted["synchronous_loads"] > COUNT
    assert ours.total < 1.02 * limit.total
    assert ours.mean < 1.05 * limit.mean
    assert ours.median < 1.2 * limit.median
    assert ours.between_tokens(99) < 1.02 * limit.between_tokens(99)
    monkeypatch.setattr(loads, "WAVES_SHARE", 0.0)
    monkeypatch.setattr(loads, "BUSY_SHARE", 0.0)
    for kind in KINDS[1:]:
        late, counted = hold(clock, users, kind)
        assert counted["loaded_bytes"]
        assert late.median > 1.4 * limit.median


def test_nobody_waits_for_a_load_that_little_is_computed_after(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = Users(history=(4000, 12000), question=32)
    apart, counted = hold(clock, users, "apart")
    assert counted["loaded_bytes"]
    assert not counted["synchronous_loads"]
    ours, _ = hold(clock, users, "ours")
    assert ours.total < 1.01 * apart.total
    assert ours.between_tokens(90) < 1.05 * apart.between_tokens(90)
    monkeypatch.setattr(loads, "BUSY_SECONDS", 1.0)
    all_synchronous, _ = hold(clock, users, "ours")
    assert all_synchronous.between_tokens(90) > 2 * apart.between_tokens(90)
