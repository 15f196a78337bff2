"""The sweep that chose the rings of kv_swap/cuda/swap_bulk.py: bandwidth, disturbance, latency.

`python bench/sweep_swap.py OUT.json [store|load [RING...]]` needs a CUDA device of sm_90 or newer.
A ring is written as CTAs x stages x KiB of a tile / drains. Of each kind of work beside the copies
there is its slowdown, and under `beside` and its name what the copies reach meanwhile, GB/s.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_swap.cuda import swap_vector
from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.cuda.swap import LIST_BYTES, KernelFamily, SwapKernel, write_list
from kv_swap.cuda.swap_bulk import Ring, bulk_family
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena

from bench.disturbance import beside, make_workloads

MIB = 1 << 20
LAYERS, JOB_BYTES = 32, 256 * MIB
PAGES = {"4k": 4096, "8k": 8192, "16k": 16384, "64k": 65536, "2m": 2 * MIB}
RINGS = {
    Direction.STORE: """
        2x5x10/2 2x4x16/2 2x4x16/1 2x4x16/3 2x4x14/2 2x4x12/2 2x5x8/2 2x8x8/4 2x8x6/4 3x4x8/2
        3x4x10/2 4x2x8/1 4x4x8/1 4x4x8/2 4x4x8/3 4x5x6/2 8x2x4/1 8x4x4/2 8x4x4/3 16x4x2/2 16x4x2/3
        16x2x4/1 1x4x32/2 1x6x16/4 1x3x64/1""",
    Direction.LOAD: """
        2x8x16/1 2x5x16/1 2x4x16/1 2x13x16/1 2x8x16/2 2x4x32/1 2x6x32/1 2x10x8/1 3x4x16/1 3x6x8/1
        4x4x8/1 4x6x8/1 4x8x8/1 4x4x16/1 4x6x16/1 8x4x4/1 8x6x4/1 8x4x8/1 16x5x2/1 16x4x4/1
        1x8x16/1 1x12x16/1 1x6x32/1 32x4x2/1""",
}
IDLE = Ring(1, 2, 128, 1)


@dataclass
class Slots:
    """Stands for an arena that lies in memory registered before."""

    address: int
    slot_bytes: int


class Bed:
    """Memory on both sides, and a job of 256 MiB for each page size."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.memory = torch.randint(0, 256, (2 * JOB_BYTES,), dtype=torch.uint8, device="cuda")
        registration.PIECE_BYTES = 1 << 40
        self.arena = HostArena(1, 2 * JOB_BYTES, register=CudaRegistrar(self.device))
        self.host = torch.from_numpy(self.arena.view()[0])
        self.host.fill_(1)
        self.lists = HostArena(len(PAGES) + 1, LIST_BYTES, register=CudaRegistrar(self.device))
        self.stream = torch.cuda.Stream()
        self.small_stream = torch.cuda.Stream()
        self.small_host = torch.empty(2048, dtype=torch.uint8, pin_memory=True)
        rng = np.random.default_rng(0)
        for index, page_bytes in enumerate(PAGES.values()):
            count = JOB_BYTES // (LAYERS * page_bytes)
            pairs = np.stack([rng.permutation(2 * count)[:count] for _ in range(2)], 1)
            write_list(self.lists.view()[index], pairs.astype(np.int32))
            if page_bytes == 65536:
                write_list(self.lists.view()[len(PAGES)], pairs[:8].astype(np.int32))

    def layout(self, page_bytes: int) -> KVLayout:
        num_blocks = 2 * JOB_BYTES // (LAYERS * page_bytes)
        first = self.memory.data_ptr()
        regions = [
            Region(first + i * num_blocks * page_bytes, page_bytes, page_bytes, i * page_bytes)
            for i in range(LAYERS)
        ]
        return KVLayout(num_blocks, tuple(regions))

    def kernel(self, page_bytes: int, family: KernelFamily) -> SwapKernel:
        layout = self.layout(page_bytes)
        slots: Any = Slots(self.arena.address, layout.slot_bytes)
        return SwapKernel(layout, slots, self.device, family)

    def seconds(self, kernel: SwapKernel, direction: Direction, entry: int, rounds: int) -> float:
        """Median of the time on the device."""
        times = []
        address = self.lists.address + entry * LIST_BYTES
        for _ in range(rounds + 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(self.stream)
            kernel.launch(direction, address, self.stream)
            last.record(self.stream)
            last.synchronize()
            times.append(first.elapsed_time(last) / 1000)
        return statistics.median(times[1:])

    def small_copy_us(self, copy: Any, samples: int) -> tuple[float, float]:
        """Median and p99 of a 2 KiB copy to the host beside copies that go on."""
        for _ in range(4):
            copy()
        times = []
        pending = []
        for _ in range(samples):
            while len(pending) < 4 or pending[-4].query():
                stream = copy()
                pending.append(torch.cuda.Event())
                pending[-1].record(stream)
            started = time.perf_counter()
            with torch.cuda.stream(self.small_stream):
                self.small_host.copy_(self.memory[:2048], non_blocking=True)
            self.small_stream.synchronize()
            times.append((time.perf_counter() - started) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times), float(np.percentile(times, 99))


def family_of(direction: Direction, text: str) -> KernelFamily:
    ctas, stages, kib, drains = map(int, re.fullmatch(r"(\d+)x(\d+)x(\d+)/(\d+)", text).groups())
    ring = Ring(ctas, stages, kib << 10, drains)
    return bulk_family(ring, IDLE) if direction is Direction.STORE else bulk_family(IDLE, ring)


def main() -> None:
    bed = Bed()
    names, rings = sys.argv[2:3], sys.argv[3:]
    wanted = [Direction(name) for name in names] or list(Direction)
    workloads = make_workloads(torch)
    rows = []
    for direction in wanted:
        for text in ("copy engine", "vector 4"):
            rows.append(measure(bed, direction, text, None, workloads))
        families = {text: family_of(direction, text) for text in rings or RINGS[direction].split()}
        with ThreadPoolExecutor(12) as pool:  # compile at once; CuPy keeps the results on disk
            list(pool.map(lambda family: bed.kernel(4096, family), families.values()))
        for text, family in families.items():
            rows.append(measure(bed, direction, text, family, workloads))
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


def measure(
    bed: Bed, direction: Direction, text: str, family: KernelFamily | None, workloads: list[Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {"direction": direction.value, "ring": text}
    started = time.perf_counter()
    if text == "copy engine":
        device, host = bed.memory[:JOB_BYTES], bed.host[:JOB_BYTES]

        def copy() -> Any:
            with torch.cuda.stream(bed.stream):
                if direction is Direction.STORE:
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)
            return bed.stream

        times = []
        for _ in range(9):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(bed.stream)
            copy()
            last.record(bed.stream)
            last.synchronize()
            times.append(first.elapsed_time(last) / 1000)
        seconds = statistics.median(times[1:])
        row["64k"] = JOB_BYTES / seconds / 1e9
    else:
        chosen = swap_vector.FAMILY if family is None else family
        for entry, (name, page_bytes) in enumerate(PAGES.items()):
            kernel = bed.kernel(page_bytes, chosen)
            took = bed.seconds(kernel, direction, entry, 7)
            row[name] = JOB_BYTES / took / 1e9
            if name == "64k":
                seconds, main_kernel = took, kernel
                row["16MiB_us"] = bed.seconds(kernel, direction, len(PAGES), 15) * 1e6
        address = bed.lists.address + list(PAGES).index("64k") * LIST_BYTES

        def copy() -> Any:
            main_kernel.launch(direction, address, bed.stream)
            return bed.stream

    if row["64k"] > 44 or family is None:
        for workload in workloads:
            row[workload.name], copying = beside(torch, workload, copy, seconds, 3)
            row[f"beside {workload.name}"] = JOB_BYTES / copying / 1e9
        if direction is Direction.STORE:
            row["small_us"], row["small_p99_us"] = bed.small_copy_us(copy, 100)
    row["took"] = time.perf_counter() - started
    print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{v:12}" for k, v in row.items()))
    sys.stdout.flush()
    return row


if __name__ == "__main__":
    main()
