"""The guard against simulated engines: harmless ones of any noise, and harmful ones."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest

from kv_offload.scheduler.guard import (
    MIN_FACTOR,
    MIN_SHARE,
    RECOVERY_STEPS,
    REST_EVERY,
    REST_STEPS,
    Guard,
)
from kv_offload.scheduler.step_clock import Step

Slowdown = Callable[[Guard], float]


def step(
    tokens: int, requests: int, context_tokens: int, stores: bool, *, loads: bool = False
) -> Step:
    return Step(tokens, requests, context_tokens, stores, loads, waits=False)


class Simulated:
    """Steps of 16 decodes whose context grows; stores are in flight in a share of them."""

    def __init__(
        self,
        slowdown: Slowdown,
        noise: float,
        store_share: float,
        seed: int = 0,
        bound: float = 1.05,
    ) -> None:
        self.guard = Guard(bound)
        self.lowest = 1.0
        self.steps_with_stores = 0
        self.seconds = 0.0
        self.harm_seconds = 0.0
        self._slowdown = slowdown
        self._noise = noise
        self._store_share = store_share
        self._random = random.Random(seed)
        self._step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step += 1
            context_tokens = 50_000 + 16 * (self._step % 4000)
            self.guard.begin_step()
            stores = self.guard.share > 0 and self._random.random() < self._store_share
            seconds = 0.005 * (1 + context_tokens / 1e6)
            self.seconds += seconds
            if stores:
                harm = seconds * (self._slowdown(self.guard) - 1)
                self.harm_seconds += harm
                seconds += harm
            seconds *= self._random.lognormvariate(0, self._noise)
            if self._random.random() < 0.01:
                seconds += 0.02
            self.guard.observe(step(16, 16, context_tokens, stores), seconds)
            self.steps_with_stores += stores
            self.lowest = min(self.lowest, self.guard.factor)


@pytest.mark.parametrize("store_share", [0.06, 0.5, 1.0])
@pytest.mark.parametrize("noise", [0.005, 0.05, 0.3])
def test_noise_throttles_nothing(noise: float, store_share: float) -> None:
    for seed in range(2):
        engine = Simulated(lambda _: 1.0, noise, store_share, seed)
        engine.run(8000)
        assert engine.steps_with_stores > 300
        assert engine.lowest == 1.0
        assert engine.guard.throttled_steps == 0


@pytest.mark.parametrize(
    ("slowdown", "noise"), [(1.08, 0.01), (1.2, 0.05), (1.5, 0.05), (2.0, 0.1)]
)
def test_harm_throttles_until_its_average_is_within_the_bound(
    slowdown: float, noise: float
) -> None:
    """Also where every store costs its step the same, however small it is."""
    engine = Simulated(lambda _: slowdown, noise, 1.0)
    engine.run(2000)
    assert engine.lowest <= 1 / 16
    engine.seconds = engine.harm_seconds = 0
    engine.run(6000)
    assert engine.harm_seconds / engine.seconds < 0.065
    assert engine.guard.throttled_steps > 6000


def test_rare_harm_is_tolerated() -> None:
    engine = Simulated(lambda _: 1.3, 0.01, 0.1)
    engine.run(5000)
    assert engine.harm_seconds / engine.seconds == pytest.approx(0.03, abs=0.01)
    assert engine.lowest == 1.0


def test_a_quarter_of_a_millisecond_is_no_harm() -> None:
    """Handing over a copy costs as much on a tiny model, whose steps are shorter than that."""
    for extra, throttles in ((0.0002, False), (0.0004, True)):
        guard = Guard(1.05)
        for _ in range(500):
            guard.begin_step()
            stores = guard.share > 0
            guard.observe(step(1, 1, 400, stores), 0.001 + extra * stores)
        assert (guard.factor < 1.0) == throttles


def test_harm_within_the_bound_is_tolerated() -> None:
    engine = Simulated(lambda _: 1.03, 0.01, 0.5)
    engine.run(5000)
    assert engine.lowest == 1.0
    engine = Simulated(lambda _: 1.4, 0.01, 0.5, bound=1.5)
    engine.run(5000)
    assert engine.lowest == 1.0


def test_when_the_harm_has_ended_it_recovers_slowly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kv_offload")
    harmful = [True]
    engine = Simulated(lambda _: 1.5 if harmful[0] else 1.0, 0.01, 1.0)
    engine.run(1000)
    assert engine.guard.factor < 1 / 16
    lowest = engine.guard.factor
    harmful[0] = False
    engine.run(5 * RECOVERY_STEPS)
    assert lowest < engine.guard.factor < 20 * lowest
    engine.run(30 * RECOVERY_STEPS)
    assert engine.guard.factor == 1.0
    throttled = engine.guard.throttled_steps
    engine.run(100)
    assert engine.guard.throttled_steps == throttled
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2, "one line for each change of state"
    assert "stores are throttled" in lines[0]
    assert "max_slowdown is 1.05" in lines[0]
    assert lines[1] == "kv-offload: stores are no longer throttled"


def test_steps_of_different_kinds_are_not_compared() -> None:
    """The first chunk of a long prompt has no stores beside it, the later ones attend to more."""
    guard = Guard(1.05)
    for _ in range(500):
        for chunk in range(4):
            guard.observe(step(8192, 1, chunk * 8192, chunk > 0), 0.2 + 0.06 * chunk)
            guard.observe(step(16, 16, 64_000, False), 0.005)
    assert guard.factor == 1.0


def test_where_stores_never_pause_a_few_steps_rest() -> None:
    guard = Guard(1.05)
    rests = []
    for _ in range(1000):
        guard.begin_step()
        stores = guard.share > 0
        rests.append(not stores)
        guard.observe(step(16, 16, 64_000, stores), 0.005)
    assert 0 < sum(rests) <= 1000 * REST_STEPS / REST_EVERY
    first = rests.index(True)
    assert first >= REST_EVERY
    assert rests[first : first + REST_STEPS + 1] == [True] * REST_STEPS + [False]
    assert not any(rests[500:]), "enough was seen"


def test_where_steps_without_stores_are_seen_none_rests() -> None:
    guard = Guard(1.05)
    for index in range(1000):
        guard.begin_step()
        assert guard.share == 1.0
        guard.observe(step(16, 16, 64_000, index % 4 > 0), 0.005)


def test_without_a_bound_nothing_is_watched() -> None:
    guard = Guard(None)
    for index in range(1000):
        guard.begin_step()
        assert guard.share == 1.0
        guard.observe(step(16, 16, 64_000, index % 2 > 0), 0.005 if index % 2 else 0.001)
    assert guard.factor == 1.0
    assert not guard._kinds


def test_what_is_remembered_is_bounded() -> None:
    guard = Guard(1.05)
    for tokens in range(1, 5000):
        guard.observe(step(tokens, tokens, tokens * 100, True), 0.005)
    assert len(guard._kinds) <= 64


def test_loads_are_neither_blamed_on_stores_nor_in_the_way_of_recovery() -> None:
    guard = Guard(1.05)
    for index in range(1000):
        guard.observe(step(16, 16, 64_000, index % 2 > 0, loads=index % 2 > 0), 0.005 + index % 2)
    assert guard.factor == 1.0
    guard.factor = 0.5
    for _ in range(4 * RECOVERY_STEPS):
        guard.observe(step(16, 16, 64_000, stores=True, loads=True), 0.005)
    assert guard.factor == 1.0


@pytest.mark.parametrize("factor", [1.0, 0.25, MIN_SHARE, 1 / 100, MIN_FACTOR])
def test_the_shares_of_the_steps_add_up_to_the_factor(factor: float) -> None:
    guard = Guard(1.05)
    guard.factor = factor
    shares = []
    for _ in range(4096):
        guard.begin_step()
        shares.append(guard.share)
    assert sum(shares) == pytest.approx(4096 * factor, rel=0.05)
    assert {share for share in shares if share} == {max(factor, MIN_SHARE)}
