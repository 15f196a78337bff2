"""How fast blocks move: GB/s from `submit` to the polled completion, beside roofline and peer.

Run with `pytest bench/bench_swap.py --benchmark-enable`; with `KV_OFFLOAD_BENCH_RESULTS` set to a
directory, `swap.json` and `swap.png` are written there. Without the option everything runs once, on
little memory.

The roofline is one contiguous copy of as many bytes: on CUDA between page-locked and device memory,
on the host within it. The peer is vLLM's own `swap_blocks_batch`, where vLLM is installed, with
descriptors made beforehand. All paths take turns within each round, so that they meet the same
machine; figures are medians over the rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.engine import Direction, SwapEngine, SwapJob
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import KVLayout, TensorDescription
from kv_swap.memory.arena import HostArena

from bench.swap_rows import COPY_ENGINE, Row, cuda_torch, save, vllm_module

KIB, MIB = 1 << 10, 1 << 20
LAYERS = 32
ROUNDS = 15
RESULTS_VARIABLE = "KV_OFFLOAD_BENCH_RESULTS"


@dataclass
class Case:
    """One engine with a scattered job, what to compare it with, and the seconds of every round."""

    engine: SwapEngine
    job: SwapJob
    nbytes: int
    others: dict[str, Callable[[], None]]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def run_others(self) -> None:
        for name, call in self.others.items():
            started = time.perf_counter()
            call()
            self.note(name, time.perf_counter() - started)

    def run(self) -> None:
        started = time.perf_counter()
        self.engine.submit(self.job)
        self.note("submit", time.perf_counter() - started)
        if isinstance(self.engine, HostSwapEngine):
            self.engine.wait(60)
        while not (completions := self.engine.poll()):
            pass
        self.note("engine", time.perf_counter() - started)
        assert completions[0].error is None

    def gbps(self, name: str) -> float | None:
        if name not in self.seconds:
            return None
        return self.nbytes / statistics.median(self.seconds[name]) / 1e9


def measure(
    case: Case,
    benchmark: Any,
    results: list[Row],
    path: str,
    page_bytes: int,
    name: str = "one way",
    rounds: int = ROUNDS,
) -> None:
    rounds = rounds if benchmark.enabled else 1
    for _ in range(2 if benchmark.enabled else 0):
        case.run_others()
        case.run()
    case.seconds.clear()
    benchmark.pedantic(case.run, setup=case.run_others, rounds=rounds)
    gbps, roofline_gbps = case.gbps("engine"), case.gbps("roofline")
    assert gbps is not None
    assert roofline_gbps is not None
    row = Row(
        name,
        case.job.direction.value,
        page_bytes,
        path,
        gbps,
        roofline_gbps,
        case.gbps("peer"),
        statistics.median(case.seconds["submit"]) * 1e6,
        gbps / roofline_gbps,
        case.nbytes / gbps / 1e3,
    )
    benchmark.extra_info.update(asdict(row))
    if benchmark.enabled:
        results.append(row)
    case.engine.close()


def describe(address: int, num_blocks: int, layers: int, page_bytes: int) -> KVLayout:
    """Layers one after another, pages without gaps."""
    layer_bytes = num_blocks * page_bytes
    return KVLayout.from_tensors(
        num_blocks,
        [
            TensorDescription(
                f"layer.{layer}",
                address + layer * layer_bytes,
                (num_blocks, page_bytes),
                (page_bytes, 1),
                1,
                0,
                page_bytes,
            )
            for layer in range(layers)
        ],
    )


def scattered(direction: Direction, num_blocks: int, count: int) -> SwapJob:
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(num_blocks)[:count] for _ in range(2)]
    return SwapJob(1, direction, np.stack(chosen, 1).astype(np.int32))


@pytest.fixture(scope="module")
def results() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    directory = os.environ.get(RESULTS_VARIABLE)
    if directory and rows:
        save(rows, Path(directory))


@pytest.mark.parametrize("page_bytes", [4 * KIB, 32 * KIB, 256 * KIB])
@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
def test_host_engine(
    benchmark: Any, results: list[Row], direction: Direction, page_bytes: int
) -> None:
    layers, total_bytes = 8, (64 if benchmark.enabled else 4) * MIB
    count = total_bytes // (layers * page_bytes)
    num_blocks = 2 * count
    memory = HostArena(num_blocks, layers * page_bytes, register=None)
    memory.view()[:] = 1
    layout = describe(memory.address, num_blocks, layers, page_bytes)
    arena = HostArena(num_blocks, layout.slot_bytes, register=None)
    arena.view()[:] = 2
    source, destination = np.ones(total_bytes, np.uint8), np.ones(total_bytes, np.uint8)
    case = Case(
        HostSwapEngine(layout, arena, [memory]),
        scattered(direction, num_blocks, count),
        total_bytes,
        {"roofline": lambda: np.copyto(destination, source)},
    )
    measure(case, benchmark, results, "host", page_bytes)


def peer(torch: Any, case: Case, arena_address: int) -> Callable[[], None]:
    """Return a call of vLLM's batch copy that moves the same pages as the case's job."""
    layout, (blocks, slots) = case.engine.layout, case.job.pairs.astype(np.int64).T
    on_device, on_host, sizes = [], [], []
    for region in layout.regions:
        on_device.append(region.address + blocks * region.block_stride_bytes)
        on_host.append(arena_address + slots * layout.slot_bytes + region.slot_offset_bytes)
        sizes.append(np.full(len(blocks), region.page_bytes, np.int64))
    device, host, nbytes = (
        torch.from_numpy(np.concatenate(parts)) for parts in (on_device, on_host, sizes)
    )
    load = case.job.direction is Direction.LOAD
    source, destination = (host, device) if load else (device, host)
    stream = torch.cuda.Stream()
    swap_blocks_batch = vllm_module()._custom_ops.swap_blocks_batch

    def copy() -> None:
        with torch.cuda.stream(stream):
            # The last argument as in vLLM's worker: only loads may read their source early.
            swap_blocks_batch(source, destination, nbytes, load)
        stream.synchronize()

    return copy


needs_cuda = pytest.mark.skipif(cuda_torch() is None, reason="needs a CUDA device and CuPy")


class Bed:
    """A CUDA engine over layers of one page size, and contiguous copies beside it."""

    def __init__(
        self,
        page_bytes: int,
        num_blocks: int,
        layers: int = LAYERS,
        path: str = "kernel",
    ) -> None:
        from kv_swap.cuda.engine import CudaSwapEngine
        from kv_swap.cuda.swap import choose_family

        self.torch = cuda_torch()
        self.device = self.torch.device("cuda", 0)
        self.path = COPY_ENGINE if path == "dma" else choose_family(self.device).name
        nbytes = num_blocks * layers * page_bytes
        self.memory = self.torch.ones(nbytes, dtype=self.torch.uint8, device=self.device)
        self.layout = describe(self.memory.data_ptr(), num_blocks, layers, page_bytes)
        registrar = CudaRegistrar(self.device)
        self.arena = HostArena(num_blocks, self.layout.slot_bytes, register=registrar)
        self.host = self.torch.ones(nbytes, dtype=self.torch.uint8, pin_memory=True)
        self.engine = CudaSwapEngine(
            self.layout,
            self.arena,
            self.device,
            [self.memory],
            copy_engine_only=path == "dma",
        )
        self.streams = {way: self.torch.cuda.Stream() for way in Direction}
        self.torch.cuda.synchronize()

    def lane_stream(self, direction: Direction) -> Any:
        """The stream on which the engine's copies end."""
        return self.engine._state.lanes[direction].stream.stream

    def copy(self, direction: Direction, part: slice) -> Any:
        """Queue one contiguous copy; return its stream."""
        with self.torch.cuda.stream(self.streams[direction]):
            if direction is Direction.LOAD:
                self.memory[part].copy_(self.host[part], non_blocking=True)
            else:
                self.host[part].copy_(self.memory[part], non_blocking=True)
        return self.streams[direction]

    def case(self, job: SwapJob) -> Case:
        nbytes = len(job.pairs) * self.layout.slot_bytes
        roofline = lambda: self.copy(job.direction, slice(nbytes)).synchronize()  # noqa: E731
        case = Case(self.engine, job, nbytes, {"roofline": roofline})
        if vllm_module() is not None:
            case.others["peer"] = peer(self.torch, case, self.arena.address)
        return case


def blocks_of(total_bytes: int, page_bytes: int, layers: int = LAYERS) -> int:
    return max(1, total_bytes // (layers * page_bytes))


PAGES = [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, 2 * MIB]
WAYS = pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("page_bytes", PAGES)
@WAYS
def test_one_way(benchmark: Any, results: list[Row], direction: Direction, page_bytes: int) -> None:
    count = blocks_of((256 if benchmark.enabled else 64) * MIB, page_bytes)
    bed = Bed(page_bytes, 2 * count)
    job = scattered(direction, 2 * count, count)
    measure(bed.case(job), benchmark, results, bed.path, page_bytes)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("page_bytes", [64 * KIB, 512 * KIB, 2 * MIB])
@WAYS
def test_one_way_by_the_copy_engine(
    benchmark: Any, results: list[Row], direction: Direction, page_bytes: int
) -> None:
    """As above, with polls that follow one another at once."""
    count = blocks_of((256 if benchmark.enabled else 64) * MIB, page_bytes)
    bed = Bed(page_bytes, 2 * count, path="dma")
    case = bed.case(scattered(direction, 2 * count, count))
    case.others.pop("peer", None)
    measure(case, benchmark, results, bed.path, page_bytes)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("path", ["kernel", "dma"])
@WAYS
def test_one_slice(benchmark: Any, results: list[Row], direction: Direction, path: str) -> None:
    """32 blocks of one region of 2 MiB: what the copy engine takes in one call."""
    bed = Bed(2 * MIB, 128, layers=1, path=path)
    case = bed.case(scattered(direction, 128, 32))
    case.others.pop("peer", None)
    measure(case, benchmark, results, bed.path, 2 * MIB, "one slice", 100)


@pytest.mark.gpu
@needs_cuda
@WAYS
def test_small_job(benchmark: Any, results: list[Row], direction: Direction) -> None:
    """8 pairs of 32 regions of 64 KiB: 16 MiB from submission to completion."""
    bed = Bed(64 * KIB, 64)
    job = scattered(direction, 64, 8)
    measure(bed.case(job), benchmark, results, bed.path, 64 * KIB, "small job", 200)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("layers", [4, 32, 128])
@WAYS
def test_submit(benchmark: Any, results: list[Row], direction: Direction, layers: int) -> None:
    """What the host spends on 512 blocks, whatever the number of layers."""
    bed = Bed(4 * KIB, 1024, layers)
    case = bed.case(scattered(direction, 1024, 512))
    case.others.pop("peer", None)
    measure(case, benchmark, results, bed.path, 4 * KIB, f"submit 512 blocks x {layers}", 50)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("page_bytes", [16 * KIB, 64 * KIB, 2 * MIB])
def test_both_directions(benchmark: Any, results: list[Row], page_bytes: int) -> None:
    """A store and a load at once; GB/s of both together, until the later one has ended."""
    count = blocks_of(256 * MIB, page_bytes)
    bed = Bed(page_bytes, 2 * count)
    order = np.random.default_rng(0).permutation(2 * count).astype(np.int32)
    jobs = [
        SwapJob(index, way, np.stack([part, part[::-1]], 1))
        for index, (way, part) in enumerate(
            zip(Direction, (order[:count], order[count:]), strict=True)
        )
    ]
    nbytes = count * bed.layout.slot_bytes
    seconds: dict[str, list[float]] = {"engine": [], "roofline": [], "submit": []}

    def roofline() -> None:
        started = time.perf_counter()
        bed.copy(Direction.STORE, slice(nbytes))
        bed.copy(Direction.LOAD, slice(nbytes, 2 * nbytes))
        for stream in bed.streams.values():
            stream.synchronize()
        seconds["roofline"].append(time.perf_counter() - started)

    def run() -> None:
        started = time.perf_counter()
        for job in jobs:
            bed.engine.submit(job)
        seconds["submit"].append(time.perf_counter() - started)
        ended = 0
        while ended < len(jobs):
            ended += len(bed.engine.poll())
        seconds["engine"].append(time.perf_counter() - started)

    rounds = ROUNDS if benchmark.enabled else 1
    benchmark.pedantic(run, setup=roofline, rounds=rounds, warmup_rounds=2)
    took = {name: statistics.median(times[2:] or times) for name, times in seconds.items()}
    gbps, roofline_gbps = (2 * nbytes / took[name] / 1e9 for name in ("engine", "roofline"))
    row = Row(
        "both directions",
        "both",
        page_bytes,
        bed.path,
        gbps,
        roofline_gbps,
        None,
        took["submit"] * 1e6,
        gbps / roofline_gbps,
    )
    if benchmark.enabled:
        results.append(row)
    bed.engine.close()


@pytest.mark.gpu
@needs_cuda
@WAYS
def test_slowdown_of_compute(benchmark: Any, results: list[Row], direction: Direction) -> None:
    """What 64 KiB pages on the move do to three kinds of work, beside the copy engine's doing."""
    if not benchmark.enabled:
        pytest.skip("takes gigabytes; run with --benchmark-enable")
    from bench.disturbance import beside, make_workloads

    count = blocks_of(256 * MIB, 64 * KIB)
    bed = Bed(64 * KIB, 2 * count)
    job = scattered(direction, 2 * count, count)
    stream = bed.lane_stream(direction)

    def ours() -> Any:
        bed.engine.submit(job)
        bed.engine.poll()
        return stream

    paths = {bed.path: ours, "one big copy": lambda: bed.copy(direction, slice(256 * MIB))}
    for workload in make_workloads(bed.torch):
        for path, copy in paths.items():
            ratio, seconds = beside(bed.torch, workload, copy, 0.0051, 7)
            name, gbps = f"slowdown of {workload.name}", 256 * MIB / seconds / 1e9
            results.append(Row(name, direction.value, 64 * KIB, path, gbps, ratio=ratio))
    benchmark.pedantic(lambda: ours().synchronize(), rounds=1)
    bed.engine.close()


@pytest.mark.gpu
@needs_cuda
def test_small_copy_beside_a_store(benchmark: Any, results: list[Row]) -> None:
    """A 2 KiB copy to the host, as of sampled tokens, while 256 MiB are stored: 200 of them."""
    count = blocks_of(256 * MIB, 64 * KIB)
    bed = Bed(64 * KIB, 2 * count)
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

    def ours() -> Any:
        bed.engine.submit(job)
        bed.engine.poll()
        return bed.lane_stream(Direction.STORE)

    copies: dict[str, Callable[[], Any]] = {
        "alone": lambda: stream,
        bed.path: ours,
        "one big copy": lambda: bed.copy(Direction.STORE, slice(256 * MIB)),
    }
    for path, copy in copies.items():
        times: list[float] = []
        while len(times) < (200 if benchmark.enabled else 2):
            event = torch.cuda.Event()
            event.record(copy())
            # At least one copy a store, however long it had to wait.
            times.append(copy_tokens())
            while not event.query() and len(times) < 200:
                times.append(copy_tokens())
        torch.cuda.synchronize()
        for name, value in (
            ("2 KiB copy, median", statistics.median(times)),
            ("2 KiB copy, p99", float(np.percentile(times, 99))),
        ):
            row = Row(name, "store", 64 * KIB, path, microseconds=value)
            if benchmark.enabled:
                results.append(row)
    benchmark.pedantic(copy_tokens, rounds=1)
    bed.engine.wait(60)
    bed.engine.close()
