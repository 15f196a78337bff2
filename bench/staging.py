"""What would copying through a ring in device memory bring? An experiment behind docs/transfer.md.

`python bench/staging.py --out FOLDER` compares, for 256 MiB scattered over 32 regions, the swap
kernel, the copy engine straight between pages and slots, and the copy engine between slots and a
ring in device memory with a kernel between that and the pages. It writes `staging.json` and
`staging.md`; after `--seconds` it measures nothing more, and says what is missing. The bytes of
every row are compared once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.disturbance import Workload, make_workloads, slowdown
from bench.staging_paths import (
    JOB_BYTES,
    MIB,
    Bed,
    ContiguousWay,
    DirectWay,
    KernelWay,
    StagedWay,
    Way,
)
from bench.swap_rows import machine
from transfer.engine import Direction

Row = dict[str, Any]
Make = Callable[[Bed, Direction], Way]

PAGES = {"64 KiB": 64 << 10, "16 KiB": 16 << 10, "2 MiB": 2 * MIB}
SAMPLES, ROUNDS = 60, 5

WAYS: dict[str, Make] = {
    "contiguous": ContiguousWay,
    "kernel": KernelWay,
    "staged 3x8 chained": lambda bed, way: StagedWay(bed, way, 8 * MIB, 3, True),
    "staged 3x8": lambda bed, way: StagedWay(bed, way, 8 * MIB, 3, False),
    "direct, turns of 4 MiB": lambda bed, way: DirectWay(bed, way, 4 * MIB),
    "direct, turns of 16 MiB": lambda bed, way: DirectWay(bed, way, 16 * MIB),
    "direct, one batch": lambda bed, way: DirectWay(bed, way, 0),
    "staged 3x4 chained": lambda bed, way: StagedWay(bed, way, 4 * MIB, 3, True),
    "staged 3x16 chained": lambda bed, way: StagedWay(bed, way, 16 * MIB, 3, True),
    "staged 3x4": lambda bed, way: StagedWay(bed, way, 4 * MIB, 3, False),
    "staged 3x16": lambda bed, way: StagedWay(bed, way, 16 * MIB, 3, False),
    "staged 2x8 chained": lambda bed, way: StagedWay(bed, way, 8 * MIB, 2, True),
    "staged 4x8 chained": lambda bed, way: StagedWay(bed, way, 8 * MIB, 4, True),
}
"""`n x m` is a ring of n chunks of m MiB."""

COLUMNS = {
    "gbps": "GB/s",
    "submit_us": "submit, us",
    "both_gbps": "GB/s, both ways",
    "d2h_p50_us": "2 KiB to host, p50 us",
    "d2h_p99_us": "p99",
    "h2d_p50_us": "2 KiB from host, p50 us",
    "h2d_p99_us": "p99",
    "product": "product",
    "right": "bytes right",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=80, help="stop measuring after these")
    arguments = parser.parse_args()
    deadline = time.perf_counter() + arguments.seconds
    rows: list[Row] = []
    missing: list[str] = []
    product = make_workloads(torch)[0]
    small = SmallCopies()
    for page, page_bytes in PAGES.items():
        bed = Bed(page_bytes)
        for name, make in WAYS.items():
            if time.perf_counter() > deadline:
                missing.append(f"{name} at {page}")
                continue
            # Straight copies of 16 KiB keep the host busy for longer than the link.
            beside = not (name.startswith("direct") and page_bytes < 64 << 10)
            for row in measure(bed, make, product if beside else None, small):
                rows.append({"way": name, "page": page, **row})
                print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
        del bed
    arguments.out.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "missing": missing, "rows": rows}
    (arguments.out / "staging.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "staging.md").write_text(as_markdown(rows, missing))
    print(f"not measured for lack of time: {', '.join(missing) or 'nothing'}")


def measure(bed: Bed, make: Make, product: Workload | None, small: SmallCopies) -> Iterator[Row]:
    """Yield a row for each direction."""
    ways = {direction: make(bed, direction) for direction in Direction}
    rows: dict[Direction, Row] = {}
    for direction, way in ways.items():
        right = None if isinstance(way, ContiguousWay) else moves_the_right_bytes(bed, way)
        seconds, submit_seconds = time_jobs([way])
        row = {"direction": direction.value, "gbps": round(JOB_BYTES / seconds / 1e9, 2)}
        row["submit_us"] = round(submit_seconds * 1e6)
        row["right"] = right
        if product is not None:
            for name, times in small.beside(way).items():
                row[f"{name}_p50_us"] = round(statistics.median(times), 1)
                row[f"{name}_p99_us"] = round(float(np.percentile(times, 99)), 1)
            row["product"] = round(slowdown(torch, product, way.submit, seconds, 3), 3)
        rows[direction] = row
    seconds, _ = time_jobs(list(ways.values()))
    for row in rows.values():
        row["both_gbps"] = round(2 * JOB_BYTES / seconds / 1e9, 2)
        yield row


def moves_the_right_bytes(bed: Bed, way: Way) -> bool:
    """Run the job over random bytes; whether it wrote all it must, and nothing else."""
    bed.randomize()
    memory, slots = bed.expected(way.direction)
    way.submit().synchronize()
    return torch.equal(bed.memory, memory) and torch.equal(bed.host.cuda(), slots)


def time_jobs(ways: list[Way]) -> tuple[float, float]:
    """Return the seconds of a job in each way at once, and of submitting them; medians."""
    took, submitted = [], []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        streams = [way.submit() for way in ways]
        submitted.append(time.perf_counter() - started)
        for stream in streams:
            stream.synchronize()
        took.append(time.perf_counter() - started)
    return statistics.median(took[1:]), statistics.median(submitted[1:])


class SmallCopies:
    """2 KiB to the host and from it on a stream of their own, as an engine makes at every step."""

    def __init__(self) -> None:
        self._device = torch.zeros(2048, dtype=torch.uint8, device="cuda")
        self._host = torch.zeros(2048, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream()

    def beside(self, way: Way) -> dict[str, list[float]]:
        """Return the microseconds of copies while jobs go on, by direction of the small copy."""
        pairs = {"d2h": (self._host, self._device), "h2d": (self._device, self._host)}
        times: dict[str, list[float]] = {name: [] for name in pairs}
        running: deque[Any] = deque()
        for _ in range(SAMPLES):
            for name, (target, source) in pairs.items():
                while running and running[0].query():
                    running.popleft()
                while len(running) < 2:
                    event = torch.cuda.Event()
                    event.record(way.submit())
                    running.append(event)
                started = time.perf_counter()
                with torch.cuda.stream(self._stream):
                    target.copy_(source, non_blocking=True)
                self._stream.synchronize()
                times[name].append((time.perf_counter() - started) * 1e6)
        torch.cuda.synchronize()
        return times


def as_markdown(rows: list[Row], missing: list[str]) -> str:
    head = ["page", "direction", "way", *COLUMNS.values()]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["page"], row["direction"], row["way"]]
        cells += ["" if row.get(key) is None else str(row[key]) for key in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    if missing:
        lines += ["", f"Not measured, for lack of time: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
