"""What is estimated of other sizes of host memory, beside replays and engines of these sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import POLICIES, make_policy
from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.metrics import OTHER_SIZES
from kv_offload.scheduler.statistics import Statistics
from kv_offload.simulation import miss_ratio_curve
from kv_offload.simulation.mini_sim import MiniSim, SampledRequest
from kv_offload.simulation.miss_ratio_curve import MissRatioCurve
from tests.support.slow import rest_is_slow

BLOCK_TOKENS = 16


def make_estimate(policy: str, slots: int) -> tuple[MissRatioCurve, Statistics]:
    """Return the estimates beside host memory of so many slots, and what they count in."""
    statistics = Statistics(CacheManager(make_policy("lru", 1)), dict)
    config: Any = SimpleNamespace(eviction_policy=policy, store_blocks="all")
    prefixes = PrefixMap([CacheGroup(0, BLOCK_TOKENS)], BLOCK_TOKENS, lambda h, _: h + b"group")
    return MissRatioCurve(config, prefixes, slots, statistics.count), statistics


def make_request(keys: list[Any], tokens: int) -> Any:
    return SimpleNamespace(block_hashes=keys, num_tokens=tokens, num_prompt_tokens=tokens)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[MiniSim]:
    """Every miniature that serves something from now on, each time that it does."""
    found = []
    serve = MiniSim.serve

    def note(self: MiniSim, *arguments: Any, **named: Any) -> Any:
        found.append(self)
        return serve(self, *arguments, **named)

    monkeypatch.setattr(MiniSim, "serve", note)
    return found


def rest(estimate: MissRatioCurve) -> None:
    estimate.work(idle=True)
    while estimate.has_turns:
        estimate.work(idle=True)


def conversations(requests: int, source: random.Random) -> Iterator[list[bytes]]:
    """Yield prompts: conversations that grow turn by turn behind a shared prompt, by block."""
    system = [source.randbytes(16) for _ in range(20)]
    talks: list[list[bytes]] = []
    for _ in range(requests):
        if source.random() < 0.4 or len(talks) < 5:
            talks.append([])
        # Of those that were opened last, mostly; some come back late.
        place = -1 - min(int(source.expovariate(0.04)), len(talks) - 1)
        talk = talks[place] = talks[place] if len(talks[place]) < 120 else []
        talk += [source.randbytes(16) for _ in range(source.randrange(5, 40))]
        yield system + talk


@pytest.mark.parametrize("policy", rest_is_slow(POLICIES))
def test_estimates_are_within_few_points_of_replays(policy, monkeypatch):
    monkeypatch.setattr(miss_ratio_curve, "MINIATURE_SLOTS", 2048)
    slots = 1024  # half of the blocks are sampled
    replays = {size: MiniSim(policy, int(slots * factor)) for size, factor in OTHER_SIZES.items()}
    hits = dict.fromkeys(OTHER_SIZES, 0)
    estimate, statistics = make_estimate(policy, slots)
    all_tokens = 0
    for prompt in conversations(700, random.Random(1)):
        # Numbers, whose hashes are always the same: which blocks are sampled does not change.
        keys: list[Any] = [int.from_bytes(key[:7]) for key in prompt]
        one = [SampledRequest(keys)]
        found = {size: sum(replay.serve(one)) * BLOCK_TOKENS for size, replay in replays.items()}
        hits = {size: hits[size] + found[size] for size in hits}
        tokens = len(keys) * BLOCK_TOKENS
        all_tokens += tokens
        request = make_request(keys, tokens)
        estimate.admitted(request, 0, found["same"])
        estimate.work(idle=False)
    rest(estimate)
    told = statistics.take(idle=True)
    assert told is not None
    assert hits["four_times"] > hits["same"] + all_tokens / 20, "sizes hardly differ"
    assert told.data["hit_tokens_at_same"] == hits["same"]
    # A small miniature of `auto` changes its rule a little earlier or later than the whole cache.
    most_points = {"auto": 4, "lru": 2}[policy]
    for size in OTHER_SIZES:
        error = (told.data[f"hit_tokens_at_{size}"] - hits[size]) / all_tokens
        assert abs(100 * error) < most_points, f"{size}: {100 * error:.1f} points"


def test_a_step_serves_one_size_and_none_where_a_request_begins(served):
    estimate, _ = make_estimate("lru", 64)
    request = make_request([b"block"], BLOCK_TOKENS)

    def steps(count: int, *, begins: bool) -> list[int]:
        counts = []
        for _ in range(count):
            if begins:
                estimate.admitted(request, 0, 0)
            before = len(served)
            estimate.work(idle=False)
            counts.append(len(served) - before)
        return counts

    enough = miss_ratio_curve.PART_KEYS
    assert steps(enough - 1, begins=True) == [0] * (enough - 1)
    assert steps(5, begins=False) == [0] * 5, "too little for a turn"
    assert steps(1, begins=True) == [0]
    assert steps(5, begins=False) == [1, 1, 1, 1, 0]
    assert len({id(miniature) for miniature in served}) == len(OTHER_SIZES)
    assert sum(steps(enough * 100, begins=True)) > 100 * len(OTHER_SIZES) - 40


@pytest.mark.parametrize("idle", [False, True], ids=["others run", "it runs alone"])
def test_a_long_prompt_makes_no_step_long(idle, served):
    """100,000 tokens, a quarter of which are sampled, ended after a few tokens."""
    estimate, statistics = make_estimate("auto", 2000)
    source = random.Random(3)
    hashes = [source.randbytes(32) for _ in range(6250)]
    tokens = len(hashes) * BLOCK_TOKENS
    request = make_request(hashes, tokens)
    for _ in range(2):  # so that there are hits
        estimate.admitted(request, 0, 0)
        estimate.work(idle=False)  # a request began
        turns, steps = [], 0
        while estimate.has_turns:
            before = len(served)
            estimate.work(idle=idle)
            turns.append(len(served) - before)
            steps += 1
        assert max(turns) <= (32 if idle else 8)
        assert steps < 100
    told = statistics.take(idle=True)
    assert told is not None
    assert told.data["hit_tokens_at_four_times"] > 0


def test_what_was_looked_up_counts_after_so_many_requests_also_without_a_sample():
    estimate, _ = make_estimate("lru", 64)
    request = make_request([], BLOCK_TOKENS - 1)
    for _ in range(miss_ratio_curve.MAX_NOTED_REQUESTS):
        assert estimate._looked_up == 0
        estimate.admitted(request, 0, 0)
        estimate.work(idle=False)
    for _ in OTHER_SIZES:
        estimate.work(idle=False)
    assert estimate._looked_up == miss_ratio_curve.MAX_NOTED_REQUESTS * (BLOCK_TOKENS - 1)


def test_what_was_noted_before_a_reset_counts_for_all_sizes():
    """Host memory is emptied while requests run, when one of the sizes has had its turn."""
    estimate, statistics = make_estimate("lru", 64)
    hashes = [bytes([block]) for block in range(miss_ratio_curve.PART_KEYS)]
    tokens = len(hashes) * BLOCK_TOKENS
    request = make_request(hashes, tokens)
    for _ in range(10):
        for found_tokens, steps in ((0, 6), (tokens, 2)):
            estimate.admitted(request, 0, found_tokens)
            for _ in range(steps):
                estimate.work(idle=False)
        estimate.reset()
        estimate.reset()
    rest(estimate)
    told = statistics.take(idle=True)
    assert told is not None
    hits = {size: told.data[f"hit_tokens_at_{size}"] for size in OTHER_SIZES}
    assert hits == dict.fromkeys(OTHER_SIZES, 10 * tokens)
