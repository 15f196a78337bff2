"""How fast blocks move: GB/s from `submit` to the polled completion, beside roofline and peer.

Run with `pytest bench/bench_swap.py --benchmark-enable`; with `KV_OFFLOAD_BENCH_RESULTS` set to a
directory, `swap.json` is written there: the machine, and a row per case. Without the option
everything runs once, on little memory.

The roofline is one contiguous copy of as many bytes: on CUDA between page-locked and device memory,
on the host within it. The peer is vLLM's own `swap_blocks_batch`, where vLLM is installed, with
descriptors made beforehand. All paths take turns within each round, so that they meet the same
machine; figures are medians over the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer.engine import Direction, SwapEngine, SwapJob
from transfer.host import HostSwapEngine
from transfer.layout import KVLayout, TensorDescription
from transfer.pinned import CudaRegistrar, HostArena

KIB, MIB = 1 << 10, 1 << 20
LAYERS = 32
ROUNDS = 15
RESULTS_VARIABLE = "KV_OFFLOAD_BENCH_RESULTS"


@dataclass(frozen=True)
class Row:
    name: str
    direction: str
    page_bytes: int
    path: str
    gbps: float
    roofline_gbps: float
    peer_gbps: float | None
    submit_us: float
    ratio: float


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


def measure(case: Case, benchmark: Any, results: list[Row], path: str, page_bytes: int) -> None:
    rounds = ROUNDS if benchmark.enabled else 1
    for _ in range(2 if benchmark.enabled else 0):
        case.run_others()
        case.run()
    case.seconds.clear()
    benchmark.pedantic(case.run, setup=case.run_others, rounds=rounds)
    gbps, roofline_gbps = case.gbps("engine"), case.gbps("roofline")
    assert gbps is not None
    assert roofline_gbps is not None
    row = Row(
        "swap",
        case.job.direction.value,
        page_bytes,
        path,
        gbps,
        roofline_gbps,
        case.gbps("peer"),
        statistics.median(case.seconds["submit"]) * 1e6,
        gbps / roofline_gbps,
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
        document = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, "swap.json").write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, str | int | None]:
    facts: dict[str, str | int | None] = {
        "date": time.strftime("%Y-%m-%d"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    torch = cuda_torch()
    if torch is not None:
        import cupy

        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["torch"] = torch.__version__
        facts["cupy"] = cupy.__version__
        facts["cuda_driver"] = cupy.cuda.runtime.driverGetVersion()
        facts["vllm"] = getattr(vllm_module(), "__version__", None)
    return facts


def cuda_torch() -> Any:
    """Return torch if it has a CUDA device and CuPy is there, else None."""
    try:
        import cupy  # noqa: F401
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def vllm_module() -> Any:
    """Return vllm, or None. Its import warns of much that is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm
            import vllm._custom_ops
        except ImportError:
            return None
    return vllm


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


@pytest.mark.gpu
@pytest.mark.skipif(cuda_torch() is None, reason="needs a CUDA device and CuPy")
@pytest.mark.parametrize(
    "page_bytes", [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, 2 * MIB]
)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
def test_kernel_engine(
    benchmark: Any, results: list[Row], direction: Direction, page_bytes: int
) -> None:
    from transfer.kernel import KernelSwapEngine

    torch = cuda_torch()
    device = torch.device("cuda", 0)
    total_bytes = (256 if benchmark.enabled else 64) * MIB
    count = max(1, total_bytes // (LAYERS * page_bytes))
    total_bytes = count * LAYERS * page_bytes
    num_blocks = 2 * count
    memory = torch.ones(num_blocks * LAYERS * page_bytes, dtype=torch.uint8, device=device)
    layout = describe(memory.data_ptr(), num_blocks, LAYERS, page_bytes)
    arena = HostArena(num_blocks, layout.slot_bytes, register=CudaRegistrar(device))
    host = torch.ones(total_bytes, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()

    def roofline() -> None:
        with torch.cuda.stream(stream):
            if direction is Direction.LOAD:
                memory[:total_bytes].copy_(host, non_blocking=True)
            else:
                host.copy_(memory[:total_bytes], non_blocking=True)
        stream.synchronize()

    engine = KernelSwapEngine(layout, arena, device, [memory])
    job = scattered(direction, num_blocks, count)
    case = Case(engine, job, total_bytes, {"roofline": roofline})
    if vllm_module() is not None:
        case.others["peer"] = peer(torch, case, arena.address)
    torch.cuda.synchronize()
    measure(case, benchmark, results, "kernel", page_bytes)
