"""How fast slots move to and from a store: GB/s from `submit` to the polled completion.

Run with `pytest bench/tiers/bench_store.py --benchmark-enable`; with `KV_OFFLOAD_BENCH_RESULTS` set
to a folder, `store.json` is written there. Without the option everything runs once, at a small
size. A real `mooncake_master` serves; the memory is that of this process, or of another by TCP on
loopback. Figures are medians over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.engine import TierDirection, TierJob
from kv_swap.tiers.store.keys import object_keys
from kv_swap.tiers.store.mooncake import MooncakeClient
from kv_swap.tiers.store.tier import StoreTier

from bench.machine import keep_rows
from tests.support.mooncake import Master, Peer, require_mooncake

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 7
SLOTS = [64 * KIB, 512 * KIB, 2 * MIB, 4 * MIB]
POOL_BYTES = 1 << 30


@dataclass(frozen=True)
class Row:
    """One measurement; `place` says whose memory the objects lie in."""

    name: str
    place: str
    slot_bytes: int
    gbps: float | None = None
    milliseconds: float | None = None


@pytest.fixture(scope="module")
def results() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    keep_rows("store.json", [asdict(row) for row in rows])


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    require_mooncake()
    with Master() as master:
        yield master.address


@pytest.fixture(params=["own", "another process"])
def place(request: pytest.FixtureRequest, master: str) -> Iterator[str]:
    """Whose memory the store has."""
    if request.param == "own":
        yield request.param
        return
    with Peer(master, segment_bytes=POOL_BYTES):
        yield request.param


def finish(tier: StoreTier, direction: TierDirection, names: list[bytes], slot_bytes: int) -> float:
    """Run a job of all slots to its end; return the seconds that it took."""
    pairs = np.stack([np.arange(len(names))] * 2, 1).astype(np.int32)
    started = time.perf_counter()
    tier.submit(TierJob(1, direction, pairs, names))
    assert tier.wait(600)
    (done,) = tier.poll()
    assert (done.failed, done.nbytes) == ((), len(names) * slot_bytes)
    return time.perf_counter() - started


@pytest.mark.parametrize("slot_bytes", SLOTS)
def test_rate(benchmark: Any, results: list[Row], master: str, place: str, slot_bytes: int) -> None:
    """Put new objects, get them and remove them, in turns."""
    count = (128 if benchmark.enabled else 8) * MIB // slot_bytes
    arena = HostArena(count, slot_bytes, register=None).view()
    arena[:] = np.random.default_rng(0).integers(0, 256, arena.shape, np.uint8)
    names = [slot.to_bytes(52, "little") for slot in range(count)]
    took: dict[TierDirection, list[float]] = {way: [] for way in TierDirection}
    asker = MooncakeClient(master, 0)
    asker.connect()
    segment_bytes = POOL_BYTES if place == "own" else 0
    with StoreTier(MooncakeClient(master, segment_bytes), arena, {}) as tier:
        keys = object_keys(tier.file_id, names)

        def run() -> None:
            for way in TierDirection:
                took[way].append(finish(tier, way, names, slot_bytes))
            asker.remove(keys)

        run()  # connects, and touches the memory of the pool
        for seconds in took.values():
            seconds.clear()
        benchmark.pedantic(run, rounds=ROUNDS if benchmark.enabled else 1)
    asker.close()
    for way, seconds in took.items():
        gbps = count * slot_bytes / statistics.median(seconds) / 1e9
        benchmark.extra_info[way.value] = gbps
        if benchmark.enabled:
            results.append(Row(way.value, place, slot_bytes, gbps=gbps))


def test_exist(benchmark: Any, results: list[Row], master: str) -> None:
    """What asking for 256 keys takes a scheduler's thread."""
    asker = MooncakeClient(master, 0)
    asker.connect()
    names = [number.to_bytes(52, "little") for number in range(256)]
    took: list[float] = []

    def run() -> None:
        started = time.perf_counter()
        asker.exist(object_keys("0" * 32, names))
        took.append(time.perf_counter() - started)

    benchmark.pedantic(run, rounds=300 if benchmark.enabled else 1)
    asker.close()
    if benchmark.enabled:
        for name, figure in (("median", 50), ("p99", 99)):
            milliseconds = float(np.percentile(took, figure)) * 1e3
            results.append(Row(f"exist of 256, {name}", "", 0, milliseconds=milliseconds))
