"""Generated traces of requests, each of which suits a different eviction policy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

from kv_offload.simulation.trace import TraceRequest

BLOCK_TOKENS = 512
REQUESTS = 6000

Prompts = Iterator[list[int]]


def _conversations(rng: random.Random, names: Iterator[int], turns: int) -> Prompts:
    """40 concurrent conversations of up to `turns` turns, on one of 100 system prompts by Zipf."""
    systems = [[next(names) for _ in range(4)] for _ in range(100)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    open_ones: list[tuple[list[int], int]] = []
    while True:
        if len(open_ones) < 40:
            open_ones.append((rng.choices(systems, weights)[0], rng.randint(1, turns)))
        place = rng.randrange(len(open_ones))
        said, left = open_ones.pop(place)
        said = said + [next(names) for _ in range(rng.randint(1, 6))]
        yield said
        if left > 1:
            open_ones.append((said, left - 1))


def _documents(rng: random.Random, names: Iterator[int]) -> Prompts:
    """Long prompts that are never sent again."""
    while True:
        yield [next(names) for _ in range(rng.randint(20, 120))]


def _loop(rng: random.Random, names: Iterator[int]) -> Prompts:
    """300 prompts of 10 blocks, repeated in the same order, as in an evaluation."""
    prompts = [[next(names) for _ in range(10)] for _ in range(300)]
    return itertools.cycle(prompts)


def _popular(rng: random.Random, names: Iterator[int]) -> Prompts:
    """One of 2,000 prefixes of 8 blocks by Zipf, and a question of a block or two."""
    prefixes = [[next(names) for _ in range(8)] for _ in range(2000)]
    weights = [1 / rank for rank in range(1, len(prefixes) + 1)]
    while True:
        yield rng.choices(prefixes, weights)[0] + [next(names) for _ in range(rng.randint(1, 2))]


def _agents(rng: random.Random, names: Iterator[int]) -> Prompts:
    """A few agents that send bursts of calls and start others, with up to 160 blocks each."""
    systems = [[next(names) for _ in range(6)] for _ in range(8)]
    agents: list[tuple[list[int], int]] = []
    while True:
        while len(agents) < 6:
            task = [next(names) for _ in range(rng.randint(1, 4))]
            agents.append((rng.choice(systems) + task, rng.randint(8, 40)))
        said, calls = agents.pop(rng.randrange(len(agents)))
        for _ in range(rng.randint(3, 10)):
            said = said + [next(names) for _ in range(rng.randint(1, 5))]
            yield said
            calls -= 1
            if calls < 1 or len(said) > 155:
                break
            if rng.random() < 0.15 and len(agents) < 12:
                agents.append(([*said, next(names)], rng.randint(4, 15)))
        else:
            agents.append((said, calls))


def _mixed(rng: random.Random, one: Prompts, other: Prompts, share: float) -> Prompts:
    while True:
        yield next(other if rng.random() < share else one)


def _one_by_one(length: int, *parts: Prompts) -> Prompts:
    for part in parts:
        yield from itertools.islice(part, length)


WORKLOADS: Mapping[str, Callable[[random.Random, Iterator[int]], Prompts]] = {
    "conversations": lambda rng, names: _conversations(rng, names, 12),
    "short sessions": lambda rng, names: _conversations(rng, names, 2),
    "conversations and scans": lambda rng, names: _mixed(
        rng, _conversations(rng, names, 12), _documents(rng, names), 0.2
    ),
    "loop": _loop,
    "popular prefixes": _popular,
    "agents in bursts": _agents,
    "loop, then conversations, then popular prefixes": lambda rng, names: _one_by_one(
        REQUESTS // 3,
        _loop(rng, names),
        _conversations(rng, names, 12),
        _popular(rng, names),
    ),
}
"""Generators by name; each takes a random generator and an iterator of block names."""


def make_workload(name: str, seed: int = 0) -> list[TraceRequest]:
    """Return `REQUESTS` requests of a workload, one second apart."""
    prompts = WORKLOADS[name](random.Random(seed), itertools.count())
    return [
        TraceRequest(1000.0 * at, BLOCK_TOKENS * len(ids), 1, tuple(ids))
        for at, ids in enumerate(itertools.islice(prompts, REQUESTS))
    ]
