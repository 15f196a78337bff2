"""What the cache manager costs the scheduler, per call for a prefix of `BATCH_KEYS` keys.

Run with `pytest bench/bench_cache_manager.py --benchmark-enable`; `extra_info` of the saved results
has the nanoseconds per key. Without that option everything runs once, on small pools.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import pytest

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import POLICIES, make_policy

BATCH_KEYS = 64
ROUNDS = 400
SIZES = [1_000, 10_000, 100_000, 1_000_000]
MAX_SIZE_AS_TEST = 10_000
MAX_GROWTH = 5.0
"""Allowed ratio of the cost per key at 1,000,000 slots to that at 1,000.

All work is O(1), but a small pool lives in the CPU's caches and a large one does not: 1.2 to 3.0
was measured on a Xeon at 2.8 GHz with CPython 3.11. Work that grew with n would be 1,000 times as
much."""


class Pool:
    """A full manager in which half of the prefixes were used twice and a tenth was evicted."""

    def __init__(self, policy_name: str, num_slots: int) -> None:
        self.random = random.Random(num_slots)
        self.manager = CacheManager(num_slots, make_policy(policy_name, num_slots))
        self.prefixes: list[list[bytes]] = []
        for _ in range(0, num_slots, BATCH_KEYS):
            self.store(self.new_prefix())
        for prefix in self.random.sample(self.prefixes, len(self.prefixes) // 2):
            if self.manager.readable(prefix).all():
                self.load(prefix)
        for _ in range(0, num_slots // 10, BATCH_KEYS):
            self.store(self.new_prefix())

    def new_prefix(self) -> list[bytes]:
        """Make keys of the size of vLLM's: a SHA-256 and a group."""
        keys = [self.random.randbytes(36) for _ in range(BATCH_KEYS)]
        self.prefixes.append(keys)
        return keys

    def readable_prefixes(self) -> Callable[[], list[bytes]]:
        """Return a function that draws a readable prefix at random, while nothing is stored."""
        readable = [keys for keys in self.prefixes if self.manager.readable(keys).all()]
        return lambda: self.random.choice(readable)

    def lookup(self, keys: list[bytes]) -> None:
        self.manager.readable(keys)

    def load(self, keys: list[bytes]) -> None:
        self.manager.complete_load(self.manager.prepare_load(keys))

    def store(self, keys: list[bytes]) -> None:
        self.manager.complete_store(self.manager.prepare_store(keys).slots)


OPERATIONS: dict[str, Callable[[Pool, list[bytes]], None]] = {
    "lookup": Pool.lookup,
    "prepare_load+complete_load": Pool.load,
    "prepare_store+complete_store": Pool.store,
}


def draw_keys(pool: Pool, operation: str) -> Callable[[], list[bytes]]:
    return pool.new_prefix if "store" in operation else pool.readable_prefixes()


@pytest.fixture(scope="module")
def enabled(request: pytest.FixtureRequest) -> bool:
    options = request.config.option
    return options.benchmark_enable or not options.benchmark_disable


@pytest.fixture(scope="module")
def get_pool(enabled: bool) -> Callable[[str, int], Pool]:
    pools: dict[tuple[str, int], Pool] = {}

    def get(policy_name: str, num_slots: int) -> Pool:
        if num_slots > MAX_SIZE_AS_TEST and not enabled:
            pytest.skip(f"fills {num_slots} slots; add --benchmark-enable")
        if (policy_name, num_slots) not in pools:
            pools[policy_name, num_slots] = Pool(policy_name, num_slots)
        return pools[policy_name, num_slots]

    return get


@pytest.mark.parametrize("num_slots", SIZES)
@pytest.mark.parametrize("policy_name", POLICIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_cost(
    benchmark,
    get_pool: Callable[[str, int], Pool],
    operation: str,
    policy_name: str,
    num_slots: int,
) -> None:
    pool = get_pool(policy_name, num_slots)
    draw = draw_keys(pool, operation)
    benchmark.group = f"{operation}, {BATCH_KEYS} keys"
    benchmark.pedantic(
        OPERATIONS[operation],
        setup=lambda: ((pool, draw()), {}),
        rounds=ROUNDS,
        warmup_rounds=ROUNDS // 10,
    )
    if benchmark.stats is not None:
        median_seconds = benchmark.stats.stats.median
        benchmark.extra_info["nanoseconds_per_key"] = round(median_seconds / BATCH_KEYS * 1e9)
    assert pool.manager.slots_in_use == num_slots
    if num_slots <= MAX_SIZE_AS_TEST:
        pool.manager.check_integrity()


@pytest.mark.parametrize("policy_name", POLICIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_cost_does_not_grow_with_the_pool(
    get_pool: Callable[[str, int], Pool], operation: str, policy_name: str
) -> None:
    pools = [get_pool(policy_name, num_slots) for num_slots in (SIZES[-1], SIZES[0])]
    draws = [draw_keys(pool, operation) for pool in pools]
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS):  # by turns, so that other load on the machine slows down both
        for pool, draw, times in zip(pools, draws, seconds, strict=True):
            keys = draw()
            start = time.perf_counter()
            OPERATIONS[operation](pool, keys)
            times.append(time.perf_counter() - start)
    large, small = (statistics.median(times) / BATCH_KEYS for times in seconds)
    assert large <= MAX_GROWTH * small, (
        f"{operation} takes {large * 1e9:.0f} ns per key at {SIZES[-1]} slots and "
        f"{small * 1e9:.0f} ns at {SIZES[0]}: {large / small:.1f} times as long"
    )
