"""An engine's estimates for other sizes of host memory match engines of these sizes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.engine.harness import (
    BLOCK_TOKENS,
    Engine,
    all_differ,
    offloading,
    plain_answers,
)
from tests.support.inputs import BLOCK_BYTES, Tokens, random_tokens

SLOTS = 40
PROMPTS = [random_tokens(8 * BLOCK_TOKENS + 1, seed) for seed in range(1, 11)]
ORDER = random.Random(7).choices(range(len(PROMPTS)), weights=range(len(PROMPTS), 0, -1), k=60)


def served(running: Engine, expected: list[Tokens]) -> Counter[str]:
    """Answer prompts that the engine's own cache does not have; return the counts."""
    for number in ORDER:
        assert running.generate([PROMPTS[number]]) == [expected[number]]
        running.settle()
        running.reset_gpu_cache()
    return Counter(running.totals)


@pytest.mark.slow  # `simulation/test_miss_ratio_curve.py` has replays in `make test`
def test_engines_of_other_sizes_have_the_hits_that_one_foretells(model_folder, monkeypatch):
    expected = plain_answers(model_folder, PROMPTS, one_by_one=True)
    # Pools of a few kilobytes, which an engine would refuse.
    monkeypatch.setattr("kv_offload.config.checks.SMALLEST_BYTES", 0)
    totals = {}
    for slots in (SLOTS // 2, SLOTS, 2 * SLOTS):
        plugin = {"cpu_bytes": f"{slots * BLOCK_BYTES}B", "eviction_policy": "lru"}
        with offloading(model_folder, plugin=plugin) as running:
            totals[slots] = served(running, expected)
            assert running.offload.manager.num_slots == slots
            assert running.blocks_loaded() * BLOCK_TOKENS >= totals[slots]["hit_tokens"] > 0
            last = ORDER[-1]
            answers = running.reload([PROMPTS[last]], corrupted=True)
            assert all_differ(answers, [expected[last]])
    half, same, twice = (totals[slots]["hit_tokens"] for slots in sorted(totals))
    assert twice > 1.3 * same > 1.69 * half
    foretold = {name: totals[SLOTS][f"hit_tokens_at_{name}"] for name in ("half", "same", "twice")}
    assert foretold == {
        "half": pytest.approx(half, rel=0.05),
        "same": pytest.approx(same, rel=0.05),
        "twice": pytest.approx(twice, rel=0.05),
    }
