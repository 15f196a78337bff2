"""How fast slots move to and from a disk: GB/s from `submit` to the polled completion.

Run with `pytest bench/tiers/bench_tiers.py --benchmark-enable --basetemp=FOLDER`, where `FOLDER` is
a new one on the disk to measure, with 2 GiB free; with `KV_OFFLOAD_BENCH_RESULTS` set to a folder,
`tiers.json` is written there. Without the option everything runs once, at a small size. The plain
way is a read or write for each slot, by as many threads. Both take turns within each round, so that
they meet the same disk; figures are medians over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.disk import DiskTier
from kv_swap.tiers.engine import TierDirection, TierJob
from kv_swap.tiers.probe import PlainFile
from numpy.typing import NDArray

from bench.machine import keep_rows

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 15
SLOTS = [64 * KIB, 512 * KIB, 2 * MIB, 4 * MIB]


@dataclass(frozen=True)
class Row:
    """One measurement; `ratio` is that to plain I/O, `microseconds` the caller's own time."""

    name: str
    slot_bytes: int
    direct: bool
    gbps: float | None = None
    plain_gbps: float | None = None
    ratio: float | None = None
    microseconds: float | None = None


@pytest.fixture(scope="module")
def results() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    keep_rows("tiers.json", [asdict(row) for row in rows])


def filled_arena(num_slots: int, slot_bytes: int) -> NDArray[np.uint8]:
    """Return slots of random bytes: a disk may compress."""
    view = HostArena(num_slots, slot_bytes, register=None).view()
    rng = np.random.default_rng(0)
    for slot in view:
        slot[:] = np.frombuffer(rng.bytes(slot_bytes), np.uint8)
    return view


def names_of(pairs: NDArray[np.int32]) -> list[bytes]:
    """Return names as long as a key with its generation."""
    return [slot.to_bytes(52, "little") for slot in pairs[:, 1].tolist()]


def finish(tier: DiskTier, direction: TierDirection, pairs: NDArray[np.int32]) -> float:
    """Run a job to its end; return the seconds that it took."""
    started = time.perf_counter()
    tier.submit(TierJob(1, direction, pairs, names_of(pairs)))
    assert tier.wait(600)
    (done,) = tier.poll()
    assert not done.failed
    return time.perf_counter() - started


@pytest.mark.parametrize("slot_bytes", SLOTS)
@pytest.mark.parametrize("direction", list(TierDirection), ids=lambda way: way.value)
def test_rate(
    benchmark: Any,
    results: list[Row],
    tmp_path: Path,
    direction: TierDirection,
    slot_bytes: int,
) -> None:
    """Half of the slots of a file, in random order, against as many bytes one after the other."""
    count = (512 if benchmark.enabled else 8) * MIB // slot_bytes
    arena = filled_arena(count, slot_bytes)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(count), rng.permutation(2 * count)[:count]]
    pairs = np.stack(chosen, 1).astype(np.int32)
    seconds: dict[str, list[float]] = {"tier": [], "plain": []}
    with (
        PlainFile(tmp_path, count, slot_bytes) as plain,
        DiskTier(tmp_path / "tier", 2 * count, arena, {}) as tier,
    ):
        for way in TierDirection:  # space that was never written is slower
            plain.move(way, arena)
            finish(tier, TierDirection.DEMOTE, pairs)
        rounds = ROUNDS if benchmark.enabled else 1
        benchmark.pedantic(
            lambda: seconds["tier"].append(finish(tier, direction, pairs)),
            setup=lambda: seconds["plain"].append(plain.move(direction, arena)),
            rounds=rounds,
        )
        gbps, plain_gbps = (
            count * slot_bytes / statistics.median(took) / 1e9 for took in seconds.values()
        )
        row = Row(direction.value, slot_bytes, tier.direct, gbps, plain_gbps, gbps / plain_gbps)
    benchmark.extra_info.update(asdict(row))
    if benchmark.enabled:
        results.append(row)
    (tmp_path / "tier").unlink()


@pytest.mark.parametrize("direction", list(TierDirection), ids=lambda way: way.value)
def test_caller(
    benchmark: Any, results: list[Row], tmp_path: Path, direction: TierDirection
) -> None:
    """What submitting a job of 64 slots and a poll take of the caller's time."""
    slot_bytes, num_slots = 64 * KIB, 512
    arena = filled_arena(num_slots, slot_bytes)
    rng, took = np.random.default_rng(0), []
    with DiskTier(tmp_path / "tier", num_slots, arena, {}) as tier:
        everything = np.stack([np.arange(num_slots)] * 2, 1).astype(np.int32)
        finish(tier, TierDirection.DEMOTE, everything)

        def run() -> None:
            pairs = everything[rng.permutation(num_slots)[:64]]
            job = TierJob(1, direction, pairs, names_of(pairs))
            started = time.perf_counter()
            tier.submit(job)
            tier.poll()
            took.append(time.perf_counter() - started)
            assert tier.wait(600)
            tier.poll()

        benchmark.pedantic(run, rounds=300 if benchmark.enabled else 1)
        if benchmark.enabled:
            for name, figure in (("median", 50), ("p99", 99)):
                microseconds = float(np.percentile(took, figure)) * 1e6
                what = f"submit and poll a {direction.value} of 64, {name}"
                results.append(Row(what, slot_bytes, tier.direct, microseconds=microseconds))
    (tmp_path / "tier").unlink()
