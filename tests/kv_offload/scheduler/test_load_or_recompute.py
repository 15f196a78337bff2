"""Load or recompute, and loads side by side, under vLLM's own scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kv_offload.measurement import MIN_MEASUREMENTS
from tests.support.beside_steps import report, teach
from tests.support.played_cases import BLOCK, FULL, WINDOW, both_ways, forget
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


@both_ways
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["one group", "two groups"])
@pytest.mark.parametrize("synchronous_loads", [False, True])
def test_a_slow_link_has_prompts_computed_and_a_fast_one_loaded(groups, synchronous_loads):
    engine = PlayedEngine(
        groups,
        synchronous_loads=synchronous_loads,
        max_num_batched_tokens=64,
        plugin={"max_pinned_share": 1.0},
    )
    expected = store(engine, [prompt(0), prompt(1)])
    teach(engine, bytes_per_second=1e3)
    engine.serve("r0", prompt(0), max_tokens=2)
    assert engine.totals["recomputed_tokens"] == 20
    assert (engine.totals["hit_tokens"], engine.totals["loaded_bytes"]) == (0, 0)
    teach(engine, bytes_per_second=1e12)
    engine.serve("r1", prompt(1), max_tokens=2)
    assert engine.totals["recomputed_tokens"] == 20
    assert engine.totals["hit_tokens"] == 20
    assert engine.totals["loaded_bytes"] > 0
    assert engine.answers == expected
    engine.check_rest()


def measure_ranks(engine: PlayedEngine, slow: int) -> None:
    """Have ranks tell of one load in different steps, the `slow` first ones before the others."""
    for rank in range(len(engine.ranks)):
        report(engine, {}, rank, load_bytes_per_second=1e3 if rank < slow else 1e12)


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
        report(engine, {}, rank, load_bytes_per_second=speed)
    engine.serve("request", prompts[0], max_tokens=2)
    assert (engine.totals["recomputed_tokens"], engine.totals["hit_tokens"]) == (0, 20)
    engine.check_rest()


def test_the_switch_loads_always():
    engine = PlayedEngine(plugin={"load_or_recompute": "always_load"})
    store(engine, [prompt(0)])
    teach(engine, bytes_per_second=1e3)
    engine.serve("r0", prompt(0))
    assert engine.totals["hit_tokens"] == 20
    assert engine.totals["recomputed_tokens"] == 0


@pytest.mark.parametrize("goes_away", [False, True])
def test_a_prompt_that_is_asked_for_again_and_again_is_counted_once(goes_away):
    """It does not fit beside one that runs, so the engine asks in every step."""
    engine = PlayedEngine(blocks=16, max_model_len=48, max_num_batched_tokens=64)
    store(engine, [prompt(0)])
    teach(engine, bytes_per_second=1e3)
    engine.add("running", prompt(7, 40), max_tokens=6)
    engine.step()
    request = engine.add("r0", prompt(0))
    for _ in range(3):
        engine.step(copies=True)
        assert not request.num_computed_tokens
        assert engine.totals["recomputed_tokens"] == 0
    if goes_away:
        engine.abort("r0")
    engine.run()
    assert engine.totals["recomputed_tokens"] == (0 if goes_away else 20)
    engine.check_rest()


def timed_step(engine: PlayedEngine, now: list[float], seconds: float) -> None:
    engine.schedule()
    engine.execute()
    now[0] += seconds
    engine.run_copies()
    engine.process()


def test_the_speed_of_computing_is_learnt_from_steps_of_prompts(now):
    engine = PlayedEngine(blocks=200, max_model_len=256, max_num_batched_tokens=128)
    for index in range(MIN_MEASUREMENTS):
        assert engine.offload.watch.prefill_rate.tokens_per_second is None
        engine.add(f"r{index}", prompt(index, 100), max_tokens=4)
        timed_step(engine, now, 0.010)  # the prompt
        for _ in range(4):
            timed_step(engine, now, 0.004)  # decodes, and the last stores
        now[0] += 60  # nobody sends anything
    rate = engine.offload.watch.prefill_rate.tokens_per_second
    assert rate == pytest.approx(100 / 0.010)
    engine.run()
    assert engine.gauges["prefill_tokens_per_second"] == pytest.approx(100 / 0.010)


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


@both_ways
def test_all_hits_of_the_queue_are_loaded_side_by_side():
    """Those that wait for their loads hold back nobody and take no tokens and no place."""
    engine = PlayedEngine(blocks=100, max_num_seqs=2, max_num_batched_tokens=4)
    store(engine, [prompt(index) for index in range(6)])
    requests = [engine.add(f"r{index}", prompt(index)).request_id for index in range(6)]
    loads = engine.schedule().kv_connector_metadata.loads
    assert [load.request_id for load in loads] == requests
    engine.run()
    assert engine.totals["hit_tokens"] == 6 * 20
    engine.check_rest()
