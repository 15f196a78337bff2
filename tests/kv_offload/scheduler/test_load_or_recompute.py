"""Load or recompute, and loads side by side, under vLLM's own scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.beside_steps import report, teach
from tests.support.played_cases import BLOCK, forget
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import VOCABULARY, Tokens


def prompt(seed: int, tokens: int = 21) -> Tokens:
    """Return five blocks and one token; the first block names the seed, of 16 different ones."""
    draw = random.Random(seed)
    named = [seed >> bit & 1 for bit in range(BLOCK)]
    return named + [draw.randrange(VOCABULARY) for _ in range(tokens - BLOCK)]


def store(engine: PlayedEngine, prompts: Sequence[Tokens]) -> dict[str, Tokens]:
    """Compute prompts one by one, keep them in host memory only; return the answers."""
    for index, tokens in enumerate(prompts):
        engine.serve(f"r{index}", tokens, max_tokens=2)
    answers, engine.answers = engine.answers, {}
    forget(engine)
    return answers


def measure_ranks(engine: PlayedEngine, slow: int) -> None:
    """Have ranks tell of one load in different steps, the `slow` first ones before the others."""
    for rank in range(len(engine.ranks)):
        report(engine, {}, rank, bytes_per_second={"load": 1e3 if rank < slow else 1e12})


@pytest.mark.parametrize("slow", [1, 2])
def test_hits_are_computed_where_the_link_of_some_ranks_is_slow(slow):
    """That others are faster, each time, does not mean that the link has recovered."""
    engine = PlayedEngine(ranks=3, max_num_batched_tokens=64, plugin={"max_pinned_share": 1.0})
    prompts = [prompt(seed) for seed in range(4)]
    expected = store(engine, prompts)
    teach(engine, bytes_per_second=1e3)
    for _ in range(15):
        measure_ranks(engine, slow)
    for index, tokens in enumerate(prompts):
        engine.serve(f"r{index}", tokens, max_tokens=2)
        measure_ranks(engine, slow)
    assert (engine.totals["recomputed_tokens"], engine.totals["hit_tokens"]) == (80, 0)
    assert engine.answers == expected
    engine.check_rest()


def test_a_hiccup_of_one_rank_counts_once():
    engine = PlayedEngine(ranks=2, max_num_batched_tokens=64, plugin={"max_pinned_share": 1.0})
    prompts = [prompt(seed) for seed in range(4)]
    store(engine, prompts)
    teach(engine, bytes_per_second=1e12)
    tells = [(0, 1e12), (1, 1e12)] * 3 + [(1, 1e3)] + [(0, 1e12)] * 15
    for rank, speed in tells:
        report(engine, {}, rank, bytes_per_second={"load": speed})
    engine.serve("request", prompts[0], max_tokens=2)
    assert (engine.totals["recomputed_tokens"], engine.totals["hit_tokens"]) == (0, 20)
    engine.check_rest()


def timed_step(engine: PlayedEngine, now: list[float], seconds: float) -> None:
    engine.schedule()
    engine.execute()
    now[0] += seconds
    engine.run_copies()
    engine.process()


def test_a_step_that_waits_for_its_load_says_nothing_about_computing(now):
    engine = PlayedEngine(
        blocks=200, slots=200, max_model_len=256, max_num_batched_tokens=256, synchronous_loads=True
    )
    store(engine, [prompt(index, 100) for index in range(4)])
    for index in range(4):
        engine.add(f"r{index}", [*prompt(index, 100), *prompt(50 + index, 100)], max_tokens=1)
        timed_step(engine, now, 0.5)
        engine.run()
    assert engine.totals["synchronous_loads"] == 4
    assert engine.offload.watch.prefill_rate.tokens_per_second is None
