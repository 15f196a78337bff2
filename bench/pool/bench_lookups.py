"""The CPU time of looking up a 32k prompt, of 2,048 blocks, in the engines of a host pool.

Run with `KV_OFFLOAD_BENCH_RESULTS=bench/results/cpu pytest bench/pool/bench_lookups.py
--benchmark-enable`, which writes `lookups.json` there. Each of eight engines has 100,000 full
slots. A lookup is the scheduler's, with leases on all blocks of a hit. A model with full attention
asks for the first blocks of a prompt, and for more while none is missing; a model with only sliding
windows asks for all blocks. All cases take turns, each time with new keys. Times are CPU time of
the thread: the work of other processes does not count, but their use of the caches does. Without
the option, everything runs once at a small size.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.machine import keep_rows
from bench.serving.stats import spread
from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.peer_slots import PeerSlots
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.scheduler.loads.lookups import Lookups
from kv_offload.scheduler.request import TrackedRequest

BLOCKS, BLOCK_TOKENS = 2048, 16
TOKENS = BLOCKS * BLOCK_TOKENS
HASH_BYTES = 32
PEERS = 7
GROUPS = {
    "full": CacheGroup(0, BLOCK_TOKENS),
    "window": CacheGroup(0, BLOCK_TOKENS, window_tokens=TOKENS),
}


@dataclass(frozen=True)
class Size:
    """The size of a run: full, or small to test only the code."""

    slots: int
    rounds: int


FULL, TRIAL = Size(100_000, 200), Size(4096, 1)


class Pool:
    """Engines of one pool, without ranks; the first one looks up prompts in the others."""

    def __init__(self, folder: Path, size: Size) -> None:
        self._size = size
        self._random = np.random.default_rng(0)
        managers = [self._engine(folder / f"seat-{number}") for number in range(1 + PEERS)]
        self.manager = managers[0]
        self.manager.share()
        assert self.manager.peers is not None
        self.peers: PeerSlots = self.manager.peers
        self.peers.directories.refresh()
        self._others = self.peers.directories.all
        assert len(self._others) == PEERS
        self._of = {0: [*managers[0].readable_slots()], PEERS: [*managers[-1].readable_slots()]}
        self._prefixes = {
            name: PrefixMap([group], BLOCK_TOKENS, lambda key, group: key + bytes([group] * 4))
            for name, group in GROUPS.items()
        }

    def _engine(self, seat: Path) -> LastingManager:
        """Return the manager of an engine whose slots all have blocks."""
        seat.mkdir()
        arena = seat / f"rank-0.kind.{seat.name}"
        arena.touch()
        slots = self._size.slots
        manager = LastingManager(make_policy("lru", slots))
        manager.limit_slots(0)
        manager.open({0: arena})
        manager.limit_slots(slots)
        for first in range(0, slots, BLOCKS):
            keys = self.new_hashes(min(BLOCKS, slots - first))
            manager.complete_store(manager.prepare_store(keys))
        assert len(manager.readable_slots()) == slots
        return manager

    def new_hashes(self, count: int = BLOCKS) -> list[bytes]:
        """Return hashes of blocks that no engine has."""
        return [self._random.bytes(HASH_BYTES) for _ in range(count)]

    def hashes_of(self, engine: int) -> list[bytes]:
        """Return hashes of blocks in the first or last engine."""
        own: list[Any] = self._of[engine]
        first = int(self._random.integers(len(own) - BLOCKS + 1))
        # Equal, but not the same objects.
        return [bytes([*key]) for key in own[first : first + BLOCKS]]

    def open(self, count: int) -> None:
        """From now on, look prompts up in the last `count` peers."""
        for number, peer in enumerate(self._others):
            self.peers.open(peer, self._size.slots if number >= PEERS - count else 0)

    def look_up(self, hashes: list[bytes], group: str, blocks: int) -> float:
        """Look up a prompt of which `blocks` blocks are found; return the seconds of CPU time."""
        request: Any = SimpleNamespace(request_id="0", block_hashes=hashes, num_tokens=TOKENS + 1)
        tracked = TrackedRequest(request)
        [hash(one) for one in hashes]  # cached, because the engine has already looked for them
        lookups = Lookups(self._prefixes[group], self.manager)
        began = time.thread_time()
        hit = lookups.find(tracked, 0)
        took = time.thread_time() - began
        assert hit is not None
        assert hit.tokens == blocks * BLOCK_TOKENS
        self.manager.end_step()
        assert not self.peers.num_leases
        return took


@pytest.fixture(scope="module")
def size(request: pytest.FixtureRequest) -> Size:
    options = request.config.option
    return FULL if options.benchmark_enable or not options.benchmark_disable else TRIAL


@pytest.fixture
def pool(size: Size) -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="kv-offload-bench-", dir="/dev/shm") as folder:
        pool = Pool(Path(folder), size)
        yield pool
        pool.peers.close()


def test_lookups_in_peers(benchmark: Any, pool: Pool, size: Size) -> None:
    took: dict[str, list[float]] = {}

    def note(case: str, hashes: list[bytes], found: int, group: str = "full") -> None:
        took.setdefault(case, []).append(pool.look_up(hashes, group, found))

    def turn() -> None:
        half = pool.hashes_of(0)[: BLOCKS // 2]
        for count, peers in ((0, "without peers"), (7, "7 peers")):
            pool.open(count)
            note(f"missing, {peers}", pool.new_hashes(), 0)
            rest = pool.new_hashes(BLOCKS - len(half))
            note(f"half of it here, {peers}", [*half, *rest], len(half))
            note(f"missing, windows alone, {peers}", pool.new_hashes(), 0, "window")
        note("all of it here, 7 peers", pool.hashes_of(0), BLOCKS)
        note("all of it in one of 7 peers", pool.hashes_of(PEERS), BLOCKS)

    benchmark.pedantic(turn, rounds=size.rounds)
    order = sorted(took, key=lambda case: case.rpartition(",")[0])
    rows = [
        {"case": case, "rounds": len(took[case]), "seconds": spread(took[case])} for case in order
    ]
    assert len(rows) == 8
    if size is FULL:
        for row in rows:
            print(row)
        keep_rows("lookups.json", rows, keys=BLOCKS, slots=size.slots)
