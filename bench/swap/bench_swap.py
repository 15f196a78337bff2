"""The speed of block copies: GB/s from `submit` to the polled completion, with roofline and peer.

Run with `pytest bench/swap/bench_swap.py --benchmark-enable`; with `KV_OFFLOAD_BENCH_RESULTS` set
to a folder, `swap.json` is written there. Without the option, everything runs once, with little
memory. All ways to copy take turns within each round, so that they meet the same conditions;
figures are medians over the rounds. Without a GPU, only the host engine is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.kernel_families import can_pack
from kv_swap.engine import CopiesWith, Direction, SwapEngine, SwapJob
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import Packing
from kv_swap.memory.arena import HostArena
from kv_swap.packing.format import POOL_ENTRY_BYTES

from bench.machine import cuda_torch, keep_rows
from bench.swap.bed import (
    LAYERS,
    NO_COPIES,
    Case,
    Copies,
    CudaBed,
    big_copies,
    describe,
    engine_copies,
    scattered,
)
from bench.swap.workloads import Decodes, Workload, beside, make_workloads

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 15
PAGES = [4 * KIB, 16 * KIB, 64 * KIB, 512 * KIB, 2 * MIB]
SMALL_COPIES = 200

LONG_BLOCKS = 256
LONG_SHAPES = {"runs": 1, "rows": 32}
"""Number of rows in a block of 2 MiB."""

LONG_PATHS: tuple[tuple[str, CopiesWith], ...] = (
    ("runs", "gates"),
    ("runs", "kernels"),
    ("rows", "kernels"),
)
"""Only kernels copy rows."""

PACKED_PAGES = [16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB]
NHD = Packing(128)
"""Rows of 8 heads of 128 channels."""

both_ways = pytest.mark.parametrize("direction", list(Direction), ids=lambda way: way.value)


def on_gpu(test: Any) -> Any:
    skip = pytest.mark.skipif(cuda_torch() is None, reason="needs a CUDA device and CuPy")
    return pytest.mark.gpu(skip(test))


Row = dict[str, Any]
"""One measurement.

`ratio` is the rate relative to the roofline; for a slowdown, it is the time of the work next to
copies over its time alone, and `gbps` is the rate of these copies. `microseconds` is the time from
submission to completion, or the latency given by the name. `path` names the copy path: kernels,
gates (the copy engine with gates), the host, or one big copy. A packed engine's rates count bytes
in the KV cache; `raw_gbps` is the rate of an engine that does not pack, in turns with it, and
`wire_ratio` is the rate of bytes on the link relative to the roofline: stores write pools, loads do
not read empty ones.
"""


@pytest.fixture(scope="module")
def results() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    keep_rows("swap.json", rows)


def measure(
    case: Case,
    benchmark: Any,
    results: list[Row],
    page_bytes: int,
    path: str = "kernels",
    name: str = "one way",
) -> None:
    """Run a case round by round, and record the medians."""
    for _ in range(2 if benchmark.enabled else 0):
        case.run_others()
        case.run()
    case.seconds.clear()
    benchmark.pedantic(case.run, setup=case.run_others, rounds=ROUNDS if benchmark.enabled else 1)
    gbps, roofline_gbps = case.gbps("engine"), case.gbps("roofline")
    assert gbps is not None
    assert roofline_gbps is not None
    layout = case.engine.layout
    moved_bytes = layout.slot_bytes
    if case.job.direction is Direction.LOAD:
        moved_bytes -= layout.pool_entries * POOL_ENTRY_BYTES
    raw_gbps, ratio = case.gbps("raw"), gbps / roofline_gbps
    row = row_of(
        name,
        case.job.direction.value,
        page_bytes,
        path,
        gbps=gbps,
        roofline_gbps=roofline_gbps,
        peer_gbps=case.gbps("peer"),
        submit_us=case.median("submit") * 1e6,
        ratio=ratio,
        microseconds=case.median("engine") * 1e6,
    )
    if raw_gbps is not None:
        row |= {"raw_gbps": raw_gbps, "wire_ratio": ratio * moved_bytes / layout.block_bytes}
    benchmark.extra_info.update(row)
    if benchmark.enabled:
        results.append(row)
    case.engine.close()


def row_of(name: str, direction: str, page_bytes: int, path: str, **figures: Any) -> Row:
    return {"name": name, "direction": direction, "page_bytes": page_bytes, "path": path, **figures}


def skip_unless_it_packs() -> None:
    capability = cuda_torch().cuda.get_device_capability()
    if not can_pack(capability):
        pytest.skip(f"compute capability {capability} cannot pack")


def blocks_of(total_bytes: int, page_bytes: int) -> int:
    return max(1, total_bytes // (LAYERS * page_bytes))


def halves(count: int) -> list[SwapJob]:
    """Return a store and a load of `count` scattered blocks each, with no block in common."""
    order = np.random.default_rng(0).permutation(2 * count).astype(np.int32)
    parts = zip(Direction, (order[:count], order[count:]), strict=True)
    return [
        SwapJob(index, way, np.stack([part, part[::-1]], 1))
        for index, (way, part) in enumerate(parts)
    ]


def seconds_of(engine: SwapEngine, jobs: list[SwapJob]) -> float:
    """Return the seconds that these jobs take when run at once."""
    started = time.perf_counter()
    for job in jobs:
        engine.submit(job)
    ended = 0
    while ended < len(jobs):
        ended += len(engine.poll())
    return time.perf_counter() - started


def contiguous_seconds(bed: CudaBed, ways: list[Direction], nbytes: int) -> float:
    """Return the seconds of a contiguous copy in each of these directions, all at once."""
    started = time.perf_counter()
    for place, way in enumerate(ways):
        bed.copy(way, slice(place * nbytes, (place + 1) * nbytes))
    for way in ways:
        bed.streams[way].synchronize()
    return time.perf_counter() - started


@pytest.mark.parametrize("page_bytes", [4 * KIB, 32 * KIB, 256 * KIB])
@both_ways
def test_host_engine(
    benchmark: Any, results: list[Row], direction: Direction, page_bytes: int
) -> None:
    """Compare the engine for vLLM's CPU build with one copy within the host."""
    layers, total_bytes = 8, (64 if benchmark.enabled else 4) * MIB
    count = total_bytes // (layers * page_bytes)
    memory = HostArena(2 * count, layers * page_bytes, register=None)
    memory.view()[:] = 1
    layout = describe(memory.address, 2 * count, layers, page_bytes)
    arena = HostArena(2 * count, layout.slot_bytes, register=None)
    arena.view()[:] = 2
    source, destination = np.ones(total_bytes, np.uint8), np.ones(total_bytes, np.uint8)
    case = Case(
        HostSwapEngine(layout, arena, [memory]),
        scattered(direction, 2 * count, count),
        total_bytes,
        {"roofline": lambda: np.copyto(destination, source)},
    )
    measure(case, benchmark, results, page_bytes, "host")


@on_gpu
@pytest.mark.parametrize("page_bytes", PAGES)
@both_ways
def test_one_way(benchmark: Any, results: list[Row], direction: Direction, page_bytes: int) -> None:
    """Copy 256 MiB of scattered pages in 32 regions."""
    count = blocks_of((256 if benchmark.enabled else 64) * MIB, page_bytes)
    bed = CudaBed(page_bytes, 2 * count, copies_with="kernels")
    measure(bed.case(scattered(direction, 2 * count, count)), benchmark, results, page_bytes)


@on_gpu
@pytest.mark.parametrize("page_bytes", PACKED_PAGES)
@both_ways
def test_packed(benchmark: Any, results: list[Row], direction: Direction, page_bytes: int) -> None:
    """Copy 256 MiB as in `test_one_way`, packed, in turns with an engine that does not pack."""
    skip_unless_it_packs()
    count = blocks_of((256 if benchmark.enabled else 64) * MIB, page_bytes)
    job = scattered(direction, 2 * count, count)
    raw = CudaBed(page_bytes, 2 * count, copies_with="kernels")
    packed = CudaBed(page_bytes, 2 * count, packing=NHD)
    packed.store_everything()
    case = packed.case(job)
    case.others.pop("peer", None)
    case.others["raw"] = raw.case(job).run
    measure(case, benchmark, results, page_bytes, "packed engine", "packed")
    raw.engine.close()


@on_gpu
@pytest.mark.parametrize("page_bytes", [16 * KIB, 64 * KIB, 2 * MIB])
def test_both_directions(benchmark: Any, results: list[Row], page_bytes: int) -> None:
    """Run a store and a load at once; GB/s of both together, until both have ended."""
    count = blocks_of(256 * MIB, page_bytes)
    bed = CudaBed(page_bytes, 2 * count, copies_with="kernels")
    jobs, ways = halves(count), list(Direction)
    nbytes = count * bed.layout.slot_bytes
    took: list[float] = []
    roofline: list[float] = []
    benchmark.pedantic(
        lambda: took.append(seconds_of(bed.engine, jobs)),
        setup=lambda: roofline.append(contiguous_seconds(bed, ways, nbytes)),
        rounds=ROUNDS if benchmark.enabled else 1,
    )
    gbps, roofline_gbps = (2 * nbytes / statistics.median(of) / 1e9 for of in (took, roofline))
    rates = {"gbps": gbps, "roofline_gbps": roofline_gbps, "ratio": gbps / roofline_gbps}
    if benchmark.enabled:
        results.append(row_of("both directions", "both", page_bytes, "kernels", **rates))
    bed.engine.close()


GATES = "gates, runs of 2 MiB"
"""The copy path that is compared with those of 64 KiB pages."""


def page_of(path: str) -> int:
    """Return this path's bytes per page when it runs next to compute or a small copy."""
    return 2 * MIB if path == GATES else 64 * KIB


def gated_bed(direction: Direction) -> tuple[CudaBed, SwapJob]:
    """Return a bed with gates, and a job of 256 MiB in scattered runs of 2 MiB."""
    count = 256 * MIB // (2 * MIB)
    bed = CudaBed(2 * MIB, 2 * count, 1, copies_with="gates")
    return bed, scattered(direction, 2 * count, count)


@on_gpu
@both_ways
def test_slowdown_of_compute(benchmark: Any, results: list[Row], direction: Direction) -> None:
    """Measure how copies of 64 KiB pages, or of runs with gates, slow three kinds of work."""
    if not benchmark.enabled:
        pytest.skip("takes gigabytes; run with --benchmark-enable")
    count = blocks_of(256 * MIB, 64 * KIB)
    bed = CudaBed(64 * KIB, 2 * count, copies_with="kernels")
    gated, runs = gated_bed(direction)
    job = scattered(direction, 2 * count, count)
    ways: dict[str, Copies] = {
        "kernels": engine_copies(bed, job),
        GATES: engine_copies(gated, runs),
        "one big copy": big_copies(bed, job),
    }
    packed = None
    if can_pack(bed.torch.cuda.get_device_capability()):
        packed = CudaBed(64 * KIB, 2 * count, packing=NHD)
        packed.store_everything()
        ways["packed engine"] = engine_copies(packed, job)
    for workload in make_workloads(bed.torch):
        for path, copies in ways.items():
            ratio, seconds = beside(bed.torch, workload, copies, 0.0051, 7)
            name, gbps = f"slowdown of {workload.name}", copies.nbytes / seconds / 1e9
            rates = {"gbps": gbps, "ratio": ratio}
            results.append(row_of(name, direction.value, page_of(path), path, **rates))
    benchmark.pedantic(bed.case(job).run, rounds=1)
    for each in (bed, gated, packed):
        if each is not None:
            each.engine.close()


@on_gpu
def test_small_copy_beside_a_store(benchmark: Any, results: list[Row]) -> None:
    """Time a 2 KiB copy to the host, like that of sampled tokens, while 256 MiB are stored."""
    count = blocks_of(256 * MIB, 64 * KIB)
    bed = CudaBed(64 * KIB, 2 * count, copies_with="kernels")
    gated, runs = gated_bed(Direction.STORE)
    torch, job = bed.torch, scattered(Direction.STORE, 2 * count, count)
    tokens = torch.ones(2 * KIB, dtype=torch.uint8, device=bed.device)
    target = torch.empty(2 * KIB, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()

    def copy_tokens() -> float:
        started = time.perf_counter()
        with torch.cuda.stream(stream):
            target.copy_(tokens, non_blocking=True)
        stream.synchronize()
        return (time.perf_counter() - started) * 1e6

    ways: dict[str, Copies] = {
        "alone": NO_COPIES,
        "kernels": engine_copies(bed, job),
        GATES: engine_copies(gated, runs),
        "one big copy": big_copies(bed, job),
    }
    for path, copies in ways.items():
        times: list[float] = []
        while len(times) < (SMALL_COPIES if benchmark.enabled else 2):
            copies.start()
            # At least one copy per store, however long it waits.
            times.append(copy_tokens())
            while not copies.ended():
                times.append(copy_tokens())
        for name, microseconds in (
            ("2 KiB copy, median", statistics.median(times)),
            ("2 KiB copy, p99", float(np.percentile(times, 99))),
        ):
            if benchmark.enabled:
                figures = {"microseconds": microseconds}
                results.append(row_of(name, "store", page_of(path), path, **figures))
    benchmark.pedantic(copy_tokens, rounds=1)
    bed.engine.close()
    gated.engine.close()


# -- blocks of 2 MiB: the copy engine with gates, kernels, and contiguous copies in turns ----------


@pytest.fixture
def long_beds(benchmark: Any) -> Iterator[dict[str, CudaBed]]:
    """Yield a bed of 512 blocks, each in one run or in 32 rows, for each copy path."""
    if not benchmark.enabled:
        pytest.skip("takes gigabytes; run with --benchmark-enable")
    beds = {
        f"{name}, {path}": CudaBed(
            2 * MIB // LONG_SHAPES[name], 2 * LONG_BLOCKS, LONG_SHAPES[name], copies_with=path
        )
        for name, path in LONG_PATHS
    }
    yield beds
    for bed in beds.values():
        bed.engine.close()


@on_gpu
@pytest.mark.parametrize("ways", [["store"], ["load"], ["store", "load"]], ids="+".join)
def test_long_blocks(
    benchmark: Any, results: list[Row], long_beds: dict[str, CudaBed], ways: list[str]
) -> None:
    """Measure GB/s, alone and next to decodes, in one direction or in both at once."""
    directions = [Direction(way) for way in ways]
    jobs = [job for job in halves(LONG_BLOCKS) if job.direction in directions]
    first = next(iter(long_beds.values()))
    each_bytes = LONG_BLOCKS * first.layout.block_bytes
    nbytes = len(jobs) * each_bytes
    took: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for path, bed in long_beds.items():
            took.setdefault(path, []).append(seconds_of(bed.engine, jobs))
        took.setdefault("contiguous", []).append(contiguous_seconds(first, directions, each_bytes))
    contiguous = statistics.median(took["contiguous"][2:])
    decodes = Decodes(first.torch)
    work = Workload(first.torch, "decodes", decodes.step, 4)
    for path, seconds in took.items():
        median = statistics.median(seconds[2:])
        rates = {"gbps": nbytes / median / 1e9, "ratio": contiguous / median}
        results.append(row_of("long blocks", "+".join(ways), 2 * MIB, path, **rates))
        if path == "contiguous":
            continue
        copies = jobs_copies(long_beds[path], jobs)
        slower, each = beside(first.torch, work, copies, median, 5)
        rates = {"gbps": nbytes / each / 1e9, "ratio": slower}
        results.append(row_of("slowdown of decodes", "+".join(ways), 2 * MIB, path, **rates))
    benchmark.pedantic(lambda: seconds_of(first.engine, jobs), rounds=1)


def jobs_copies(bed: CudaBed, jobs: list[SwapJob]) -> Copies:
    """Return copies that run these jobs at once; a copy has ended when all its jobs have ended."""
    nbytes = len(jobs) * LONG_BLOCKS * bed.layout.block_bytes
    count = [0]

    def start() -> None:
        for job in jobs:
            bed.engine.submit(job)

    def ended() -> int:
        count[0] += len(bed.engine.poll())
        whole, count[0] = divmod(count[0], len(jobs))
        return whole

    return Copies(nbytes, start, ended)


@on_gpu
@both_ways
def test_hooks_of_long_blocks(
    benchmark: Any, results: list[Row], long_beds: dict[str, CudaBed], direction: Direction
) -> None:
    """Measure host microseconds for a job of 512 MiB: `submit`, and polls every 5 ms."""
    jobs = [job for job in halves(LONG_BLOCKS) if job.direction is direction]
    for path, bed in long_beds.items():
        took: dict[str, list[float]] = {"submit": [], "polls": []}
        for _ in range(ROUNDS):
            started = time.perf_counter()
            bed.engine.submit(jobs[0])
            took["submit"].append((time.perf_counter() - started) * 1e6)
            polls, done = 0.0, False
            while not done:
                time.sleep(0.005)
                started = time.perf_counter()
                done = bool(bed.engine.poll())
                polls += (time.perf_counter() - started) * 1e6
            took["polls"].append(polls)
        for name, times in took.items():
            figures = {"microseconds": statistics.median(times)}
            results.append(row_of(f"host, {name}", direction.value, 2 * MIB, path, **figures))
    benchmark.pedantic(lambda: seconds_of(bed.engine, jobs), rounds=1)
