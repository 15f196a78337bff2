"""The CPU time of looking up the 2,048 blocks of a 32k prompt in the peers of a host pool.

Run with `KV_OFFLOAD_BENCH_RESULTS=bench/results/cpu pytest bench/pool/bench_lookups.py
--benchmark-enable`, which writes `lookups.json` there. Each of eight engines has 100,000 full
slots. All cases take turns, each time with new keys; times are CPU time of the thread, so work of
other processes does not count, but what they take of the caches does. Without the option everything
runs at a small size, once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.machine import keep_rows
from bench.serving.stats import spread
from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.peer_slots import PeerSlots
from kv_offload.cache.policies import make_policy

KEYS = 2048
NAME_BYTES = 36
"""Bytes of a block's key: vLLM's hash and the number of the cache group."""
PEERS = 7
MISSING_IN = {
    0: "missing, without peers",
    1: "missing in 1 peer",
    3: "missing in 3 peers",
    7: "missing in 7 peers",
}


@dataclass(frozen=True)
class Size:
    """The size of a run: full, or small if only the code is tested."""

    slots: int
    rounds: int


FULL, TRIAL = Size(100_000, 300), Size(4096, 1)


class Pool:
    """Engines of one pool, without ranks; the first one looks up keys in the others."""

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
        self._of_a_peer: list[Any] = list(managers[-1].readable_slots())

    def _engine(self, seat: Path) -> LastingManager:
        """Return the manager of an engine all slots of which have blocks."""
        seat.mkdir()
        arena = seat / f"rank-0.kind.{seat.name}"
        arena.touch()
        slots = self._size.slots
        manager = LastingManager(make_policy("lru", slots))
        manager.limit_slots(0)
        manager.open({0: arena})
        manager.limit_slots(slots)
        for first in range(0, slots, KEYS):
            keys = self.new_keys(min(KEYS, slots - first))
            manager.complete_store(manager.prepare_store(keys))
        assert len(manager.readable_slots()) == slots
        return manager

    def new_keys(self, count: int = KEYS) -> list[bytes]:
        """Return keys that no engine has."""
        return [self._random.bytes(NAME_BYTES) for _ in range(count)]

    def keys_of_a_peer(self) -> list[Any]:
        """Return keys that one of the peers has, the last one."""
        first = int(self._random.integers(len(self._of_a_peer) - KEYS + 1))
        # Of the same bytes, but not the same objects.
        return [bytes([*key]) for key in self._of_a_peer[first : first + KEYS]]

    def open(self, count: int) -> None:
        """Look up keys in so many peers from now on, the last ones."""
        for number, peer in enumerate(self._others):
            self.peers.open(peer, self._size.slots if number >= PEERS - count else 0)

    def look_up(self, keys: list[Any], *, has: bool, leases: bool = False) -> float:
        """Look up keys, lease what is found if asked to, and return the seconds of CPU time."""
        began = time.thread_time()
        found = self.manager.readable(keys)
        if leases:
            assert self.manager.reserve(keys)
        took = time.thread_time() - began
        assert found.all() if has else not found.any()
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

    def turn() -> None:
        for count, case in MISSING_IN.items():
            pool.open(count)
            times = took.setdefault(case, [])
            times.append(pool.look_up(pool.new_keys(), has=False))
        for name, leases in (("in one of 7 peers", False), ("in one of 7 peers, leased", True)):
            times = took.setdefault(name, [])
            times.append(pool.look_up(pool.keys_of_a_peer(), has=True, leases=leases))

    benchmark.pedantic(turn, rounds=size.rounds)
    rows = [
        {"case": case, "rounds": len(times), "seconds": spread(times)}
        for case, times in took.items()
    ]
    assert len(rows) == len(MISSING_IN) + 2
    if size is FULL:
        for row in rows:
            print(row)
        keep_rows("lookups.json", rows, keys=KEYS, slots=size.slots)
