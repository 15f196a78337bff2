"""Conversations: users who come back, each time with a longer prompt, while others are served.

A turn's prompt is all that was said before and something new. The GPU's cache holds a few of the
conversations, so most turns find their history in host memory or have it computed again.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from bench.serving.engine import ServingEngine
from bench.serving.shapes import Conversations
from bench.serving.stats import percentiles
from bench.serving.timeline import describe

Result = dict[str, Any]


def conversations(engine: ServingEngine, seed: int) -> Result:
    """Hold conversations; return how long it took, and how long their users waited for tokens.

    The same `seed` asks the same questions in the same order; the answers are the engine's. Before
    that a few others are held twice, so that everything is compiled and measured.
    """
    load = engine.shape.conversations
    few = dataclasses.replace(load, count=load.at_once, turns=2)
    for _ in range(2):
        _Run(engine, few, 1_000_000).run()
        engine.reset()
    engine.timeline.forget()
    before = engine.totals.counters()
    run = _Run(engine, load, seed)
    run.run()
    result = run.result()
    engine.rest()
    counted = {name: value - before[name] for name, value in engine.totals.counters().items()}
    if engine.connector == "kv-offload":
        result["loads"] = [_loads(engine, run, counted)]
        hits = engine.timeline.take(run.asked, run.first)
        result["hits"] = describe(hits, engine.shape.block_bytes(engine.item_bytes))
    engine.reset()
    return result


def _loads(engine: ServingEngine, run: _Run, counted: dict[str, float]) -> Result:
    """Return how many bytes were loaded, and between what and what it must be.

    At most all prompts are loaded. What the GPU's cache cannot hold of all conversations must be
    loaded once, but for the last words of each, which nobody asks for again: half of it at least.
    """
    token_bytes = engine.shape.block_bytes(engine.item_bytes) // engine.shape.block_tokens
    spoken = sum(map(len, run.spoken)) - engine.shape.gpu_blocks * engine.shape.block_tokens
    return {
        "least_bytes": max(token_bytes, spoken * token_bytes // 2),
        "most_bytes": run.prompt_tokens * token_bytes,
        "loaded_bytes": int(counted["loaded_bytes"]),
    }


class _Run:
    """The conversations of one seed, `at_once` of them being answered at a time."""

    def __init__(self, engine: ServingEngine, load: Conversations, seed: int) -> None:
        self._engine = engine
        self._load = load
        random = np.random.default_rng((seed, load.count))
        system = self._draw(random, load.system_tokens)
        shortest, longest = load.history_tokens
        histories = random.integers(shortest, longest, load.count, endpoint=True)
        self.spoken = [system + self._draw(random, int(length)) for length in histories]
        """All that was said by now, by conversation."""
        self._questions = [
            [self._draw(random, load.new_tokens) for _ in range(load.turns)]
            for _ in range(load.count)
        ]
        # Whose turn is when; a conversation that still gets an answer is passed over.
        self._order = random.permutation(np.repeat(np.arange(load.count), load.turns)).tolist()
        self._open: dict[str, int] = {}
        self._answers: dict[str, list[int]] = {}
        self.asked: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._between: list[float] = []
        self._seconds = 0.0
        self.prompt_tokens = 0

    @staticmethod
    def _draw(random: np.random.Generator, length: int) -> list[int]:
        tokens: list[int] = random.integers(10, 31000, length).tolist()
        return tokens

    def run(self) -> None:
        """Hold all conversations."""
        begin = time.perf_counter()
        while self._order or self._open:
            while len(self._open) < self._load.at_once and self._ask():
                pass
            tokens = self._engine.step()
            now = time.perf_counter()
            for request_id, new in tokens.items():
                self._take(request_id, new, now)
        self._seconds = time.perf_counter() - begin

    def _ask(self) -> bool:
        """Ask the next question whose conversation waits for no answer; False if there is none."""
        answered = self._open.values()
        place = next((i for i, whose in enumerate(self._order) if whose not in answered), None)
        if place is None:
            return False
        whose = self._order.pop(place)
        self.spoken[whose] += self._questions[whose].pop()
        prompt = list(self.spoken[whose])
        self.prompt_tokens += len(prompt)
        request_id = f"turn{len(self.asked)}"
        self._open[request_id] = whose
        self._answers[request_id] = []
        self.asked[request_id] = time.perf_counter()
        tokens = {"prompt_token_ids": prompt}
        self._engine.add(request_id, tokens, self._load.answer_tokens)
        return True

    def _take(self, request_id: str, tokens: list[int], now: float) -> None:
        if request_id in self.first:
            self._between.append(now - self._last[request_id])
        else:
            self.first[request_id] = now
        self._last[request_id] = now
        self._answers[request_id] += tokens
        if len(self._answers[request_id]) == self._load.answer_tokens:
            self.spoken[self._open.pop(request_id)] += self._answers.pop(request_id)

    def result(self) -> Result:
        """Return what was measured, in seconds."""
        waits = [self.first[request_id] - when for request_id, when in self.asked.items()]
        return {
            "seconds": self._seconds,
            "turns": len(waits),
            "first_token": {"mean": statistics.mean(waits), **percentiles(waits)},
            "between_tokens": percentiles(self._between),
        }
