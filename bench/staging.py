"""What would copying through a ring in device memory bring? See docs/design/transfer.md.

`python bench/staging.py --out FOLDER` compares, for 256 MiB scattered over 32 regions, the swap
kernel, the copy engine straight between pages and slots, and the copy engine between slots and a
ring in device memory with a kernel between that and the pages. It writes `staging.json`; after
`--seconds` it measures nothing more, and says what is missing. The bytes of every way are compared
once. `--plot staging.json` draws `staging.png` beside it, on any machine with matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_swap.engine import Direction

MIB = 1 << 20
ROUNDS, SAMPLES, SAMPLE_SECONDS = 9, 200, 0.5
LATENCY_BYTES = {"2 KiB": 2 << 10, "64 KiB": 64 << 10}

Row = dict[str, Any]


def ways() -> dict[str, Callable[..., Any]]:
    """Return what makes each way. `staged 4x8 c16 r4`: 4 chunks of 8 MiB, 16 CTAs, runs of 4 slots.

    With `d` the kernel finds its list in device memory, `p1` gives it a high priority; `turns` are
    as in transfer/kv_swap/cuda/streams.py.
    """
    from bench.staging_paths import (
        ContiguousWay,
        DirectWay,
        KernelWay,
        PitchedBatchWay,
        PitchedWay,
        StagedWay,
    )

    made: dict[str, Callable[..., Any]] = {"contiguous": ContiguousWay, "kernel": KernelWay}

    def add(name: str, kind: Any, *rest: Any, **options: Any) -> None:
        made[name] = lambda bed, direction: kind(bed, direction, *rest, **options)

    add("kernel p1", KernelWay, priority=-1)
    for mib in (2, 4, 8, 16):
        add(f"pieces {mib}", ContiguousWay, mib * MIB)
    for mib in (4, 8, 16):
        add(f"pieces {mib} turns", ContiguousWay, mib * MIB, True)

    def staged(mib: int, ctas: int, suffix: str = "", chunks: int = 4, **options: Any) -> None:
        name = f"staged {chunks}x{mib} c{ctas}{suffix}"
        add(name, StagedWay, mib * MIB, chunks, ctas, **options)

    for ctas in (4, 16, 48):
        staged(16, ctas)
    for mib in (2, 4, 8, 16):
        staged(mib, 16, " d", device_lists=True)
    staged(16, 16, " d", chunks=2, device_lists=True)
    staged(32, 16, " d", chunks=2, device_lists=True)
    for ctas in (4, 8, 64):
        staged(16, ctas, " d", device_lists=True)
    for run in (1, 4, 16):
        staged(16, 16, f" d r{run}", device_lists=True, run=run)
    for ctas in (4, 16):
        staged(16, ctas, " d p1", device_lists=True, priority=-1)
    for mib in (4, 8, 16):
        staged(mib, 16, " d turns", device_lists=True, turns=True)
    add("pitched batch", PitchedBatchWay)
    add("pitched batch 16 turns", PitchedBatchWay, 16 * MIB)
    add("pitched", PitchedWay)
    for mib in (4, 8, 16):
        add(f"pitched {mib} turns", PitchedWay, mib * MIB)
    for mib in (4, 16):
        add(f"direct {mib} turns", DirectWay, mib * MIB)
    return made


BESIDE = [
    "contiguous",
    "kernel",
    "kernel p1",
    "pitched 4 turns",
    "staged 4x16 c16 d",
    "staged 4x4 c16 d turns",
    "staged 4x8 c16 d turns",
    "staged 4x16 c16 d turns",
    "pitched",
    "staged 4x16 c4 d",
    "staged 4x16 c16 d p1",
    "staged 4x16 c4 d p1",
    "pitched 8 turns",
    "pitched batch 16 turns",
    "direct 4 turns",
]
"""Ways whose effect on others is measured, the most telling first."""

SMALL_PAGES = [
    "contiguous",
    "kernel",
    "staged 4x16 c16 d",
    "staged 4x8 c16 d turns",
    "pitched",
    "pitched 4 turns",
    "direct 16 turns",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=150, help="stop measuring after these")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="of the ways besides contiguous and kernel"
    )
    parser.add_argument("--plot", type=Path, metavar="JSON")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(arguments.plot.read_text()), arguments.plot.with_suffix(".png"))
    if arguments.out:
        # The most there are: streams that share a hardware queue wait for each other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        arguments.out.mkdir(parents=True, exist_ok=True)
        Run(arguments.out / "staging.json", arguments.seconds).measure(arguments.only)


class Run:
    """All measurements of one call; what is there is written after each part of it."""

    def __init__(self, target: Path, seconds: float) -> None:
        import torch

        from bench.disturbance import make_workloads
        from bench.swap_rows import machine

        self.torch = torch
        self.target = target
        self.started = time.perf_counter()
        self.deadline = self.started + seconds
        self.document: Row = {
            "machine": machine(),
            "job_bytes": 256 * MIB,
            "missing": [],
            "host_us": {},
            "rows": [],
        }
        self.workloads = make_workloads(torch)

    def measure(self, only: str) -> None:
        from bench.staging_paths import Bed

        self.document["host_us"] = self.host_costs()
        print(self.document["host_us"], flush=True)
        makers = {
            name: make
            for name, make in ways().items()
            if name in {"contiguous", "kernel"} or re.search(only, name)
        }
        bed = Bed(16 << 10)
        self.bandwidth(bed, self.make(bed, makers, SMALL_PAGES))
        bed = Bed(64 << 10)
        made = self.make(bed, makers, list(makers))
        rows = self.bandwidth(bed, made)
        self.save()
        there = set(made)
        del made
        for name in BESIDE:
            if name not in there:
                continue
            if time.perf_counter() > self.deadline:
                self.document["missing"].append(f"{name}: beside others")
                continue
            started = time.perf_counter()
            # Made anew: hardware queues are few, and those that idle may share one.
            for direction, way in self.make(bed, makers, [name])[name].items():
                row = rows[name, direction]
                row.update(self.latencies(way))
                for workload in self.workloads:
                    seconds = 256 * MIB / row["gbps"] / 1e9
                    work, copying = self.beside(workload, way, seconds)
                    row[workload.name] = round(work, 3)
                    row[f"gbps_beside_{workload.name}"] = round(256 * MIB / copying / 1e9, 1)
                print(show(row), flush=True)
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        self.save()
        print("not measured:", "; ".join(self.document["missing"]) or "nothing")

    def save(self) -> None:
        self.document["seconds"] = round(time.perf_counter() - self.started, 1)
        self.target.write_text(json.dumps(self.document, indent=1) + "\n")
        print(f"{self.document['seconds']} s", flush=True)

    def host_costs(self) -> Row:
        """Microseconds of the host for each call that a way is made of."""
        from cupy.cuda import runtime

        torch = self.torch
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        device = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
        host = torch.empty(16 * MIB, dtype=torch.uint8, pin_memory=True)
        handle, kind = stream.cuda_stream, runtime.memcpyDefault
        ends = (host.data_ptr(), device.data_ptr())
        calls: dict[str, Callable[[], Any]] = {
            "record an event": lambda: event.record(stream),
            "wait for an event": lambda: stream.wait_event(event),
            "cudaMemcpyAsync of 2 KiB": lambda: runtime.memcpyAsync(*ends, 2048, kind, handle),
            "cudaMemcpyAsync of 2 MiB": lambda: runtime.memcpyAsync(*ends, 2 * MIB, kind, handle),
            "cudaMemcpy2DAsync of 32 x 64 KiB": lambda: runtime.memcpy2DAsync(
                ends[0], 64 << 10, ends[1], 512 << 10, 64 << 10, 32, kind, handle
            ),
        }
        costs = {}
        for name, call in calls.items():
            for _ in range(2):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(200):
                    call()
                costs[name] = round((time.perf_counter() - started) / 200 * 1e6, 2)
        torch.cuda.synchronize()
        return costs

    def make(
        self, bed: Any, makers: dict[str, Callable[..., Any]], names: list[str]
    ) -> dict[str, dict[Direction, Any]]:
        """Make the ways; one that cannot be made is missing, with the reason."""
        made: dict[str, dict[Direction, Any]] = {}
        for name in names:
            if name not in makers:
                continue
            try:
                made[name] = {way: makers[name](bed, way) for way in Direction}
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                self.document["missing"].append(f"{name}: {error}")
        return made

    def bandwidth(
        self, bed: Any, made: dict[str, dict[Direction, Any]]
    ) -> dict[tuple[str, Direction], Row]:
        """GB/s and the host's time, all ways in turn in each round; the bytes compared first."""
        rows: dict[tuple[str, Direction], Row] = {}
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for name in list(made):
            for direction, way in made[name].items():
                try:
                    right = self.moves_the_right_bytes(bed, way)
                except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                    self.document["missing"].append(f"{name}, {direction.value}: {error}")
                    made.pop(name, None)
                    break
                rows[name, direction] = {
                    "way": name,
                    "page_bytes": bed.page_bytes,
                    "direction": direction.value,
                    "bytes_right": right,
                }
        for _ in range(ROUNDS):
            for name, pair in made.items():
                for key, some in (*((d.value, [w]) for d, w in pair.items()), ("both", pair)):
                    together = list(some.values()) if isinstance(some, dict) else some
                    times.setdefault((name, key), []).append(self.time(together))
        for (name, direction), row in rows.items():
            if name not in made:
                continue
            for key, label, nbytes in (
                (direction.value, "gbps", 256 * MIB),
                ("both", "both_gbps", 512 * MIB),
            ):
                took = [seconds for seconds, _ in times[name, key][1:]]
                row[label] = round(nbytes / statistics.median(took) / 1e9, 2)
                spread = (nbytes / max(took) / 1e9, nbytes / min(took) / 1e9)
                row[f"{label}_spread"] = [round(value, 2) for value in spread]
            submits = [submit for _, submit in times[name, direction.value][1:]]
            row["submit_us"] = round(statistics.median(submits) * 1e6)
            self.document["rows"].append(row)
            print(show(row), flush=True)
        return rows

    def time(self, together: list[Any]) -> tuple[float, float]:
        """Return the seconds of these jobs at once, and of submitting them."""
        self.torch.cuda.synchronize()
        started = time.perf_counter()
        streams = [way.submit() for way in together]
        submitted = time.perf_counter() - started
        for stream in streams:
            stream.synchronize()
        return time.perf_counter() - started, submitted

    def moves_the_right_bytes(self, bed: Any, way: Any) -> bool | None:
        """Run the job over random bytes; whether it wrote all it must, and nothing else."""
        from bench.staging_paths import ContiguousWay

        if isinstance(way, ContiguousWay):
            return None
        bed.randomize()
        memory, slots = bed.expected(way)
        way.submit()
        self.torch.cuda.synchronize()
        equal = self.torch.equal
        return bool(equal(bed.memory, memory) and equal(bed.host.cuda(), slots))

    def beside(self, workload: Any, way: Any, seconds: float) -> tuple[float, float]:
        from bench.disturbance import beside

        return beside(self.torch, workload, way.submit, seconds, 5)

    def latencies(self, way: Any) -> Row:
        """Microseconds of small copies in the same direction while jobs go on."""
        torch = self.torch
        from bench.staging_paths import new_stream

        figures: Row = {}
        stream = new_stream()
        for name, nbytes in LATENCY_BYTES.items():
            device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            load = way.direction is Direction.LOAD
            target, source = (device, host) if load else (host, device)
            running: deque[Any] = deque()
            times: list[float] = []
            until = time.perf_counter() + SAMPLE_SECONDS
            while len(times) < SAMPLES and time.perf_counter() < until:
                while running and running[0].query():
                    running.popleft()
                while len(running) < 2:
                    running.append(torch.cuda.Event())
                    running[-1].record(way.submit())
                started = time.perf_counter()
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                stream.synchronize()
                times.append((time.perf_counter() - started) * 1e6)
            torch.cuda.synchronize()
            figures[f"{name}, p50 us"] = round(statistics.median(times), 1)
            figures[f"{name}, p99 us"] = round(float(np.percentile(times, 99)), 1)
        return figures


def show(row: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in row.items())


def plot(document: Row, target: Path) -> None:
    """Draw what was measured of each way beside others."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if "product" in row]
    names = list(dict.fromkeys(row["way"] for row in rows))
    panels = {
        "gbps": "GB/s",
        "product": "product slowed by",
        "decode": "decode slowed by",
        "both_gbps": "GB/s, both ways at once",
        "gbps_beside_product": "GB/s beside the product",
        "gbps_beside_decode": "GB/s beside decode",
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 0.6 * len(names) + 2), sharey=True)
    for axis, (key, label) in zip(axes.flat, panels.items(), strict=True):
        for shift, direction in ((-0.2, "load"), (0.2, "store")):
            some = {row["way"]: row[key] for row in rows if row["direction"] == direction}
            places = [names.index(name) + shift for name in some]
            axis.barh(places, list(some.values()), height=0.38, label=direction)
        axis.set(xlabel=label, xlim=(1 if "slowed" in label else 0, None))
        axis.grid(alpha=0.3, axis="x")
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    axes[0, 2].legend()
    facts = document["machine"]
    figure.suptitle(" · ".join(str(facts[k]) for k in ("gpu", "driver", "date") if facts.get(k)))
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
