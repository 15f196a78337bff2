"""Measures how long an engine waits while host memory is page-locked, by piece size.

usage: python -m bench.swap.pinning [--gib 8] [--out FILE.json]

Needs a CUDA device and twice as much free memory. Every row locks `--gib` GiB in the background,
while the main thread behaves like an engine. `steps` are like decodes: small copies to the device,
a CUDA graph of 5 ms, and a small copy back that the host waits for. `captures` are like startup:
small launches and the capture of a graph. Rows without a piece size lock nothing.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kv_swap.cuda.device import CudaRegistrar
from kv_swap.memory import registration
from kv_swap.memory.mapping import Mapping

from bench.machine import cuda_torch, machine, write_result
from bench.serving.stats import percentiles

MIB, GIB = 1 << 20, 1 << 30
PIECES = (256 * MIB, 64 * MIB, 16 * MIB, 4 * MIB)
ALONE_SECONDS = 2.0
GRAPH_SECONDS = 0.005
INPUTS = 12
LAUNCHES = 100


class Steps:
    """Steps like those of a decoding engine."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._inputs = [torch.zeros(2048, dtype=torch.uint8).pin_memory() for _ in range(INPUTS)]
        self._targets = [one.cuda() for one in self._inputs]
        self._tokens = torch.zeros(2048, dtype=torch.uint8).pin_memory()
        factors = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
        rows = torch.ones(16, 4096, dtype=torch.bfloat16, device="cuda")

        def product(count: int) -> None:
            for _ in range(count):
                torch.mm(rows, factors)

        product(10)
        torch.cuda.synchronize()
        began = time.perf_counter()
        product(1000)
        torch.cuda.synchronize()
        count = int(1000 * GRAPH_SECONDS / (time.perf_counter() - began))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            product(count)

    def run(self) -> None:
        """Run one step, and wait for it."""
        for target, source in zip(self._targets, self._inputs, strict=True):
            target.copy_(source, non_blocking=True)
        self._graph.replay()
        self._tokens.copy_(self._targets[0], non_blocking=True)
        done = self._torch.cuda.Event()
        done.record()
        done.synchronize()


class Captures:
    """Launches and captures like those of a starting engine."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._value = torch.zeros(16, device="cuda")
        self._stream = torch.cuda.Stream()

    def run(self) -> None:
        """Launch some kernels, and capture some in a graph."""
        for _ in range(LAUNCHES):
            self._value.add_(1)
        self._torch.cuda.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.stream(self._stream):
            graph.capture_begin()
            for _ in range(20):
                self._value.add_(1)
            graph.capture_end()


def time_runs(work: Steps | Captures, until: Callable[[], bool]) -> dict[str, float]:
    """Run work until a condition is true, and return figures of the runs in milliseconds."""
    found: list[float] = []
    while not until() or not found:
        began = time.perf_counter()
        work.run()
        found.append(time.perf_counter() - began)
    counted = percentiles(found)
    return {"count": counted.pop("count")} | {
        name: round(1e3 * value, 3) for name, value in counted.items()
    }


def _after(end: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() > end


def rows(torch: Any, nbytes: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of work without locking, then rows for each piece size."""
    works: dict[str, Steps | Captures] = {"steps": Steps(torch), "captures": Captures(torch)}
    device = torch.device("cuda", 0)
    for name, work in works.items():
        for _ in range(2):  # the first run warms up
            end = time.perf_counter() + ALONE_SECONDS
            alone = time_runs(work, _after(end))
        yield {"work": name, "piece_mib": 0, "ms": alone}
        for piece_bytes in PIECES:
            took: list[float] = []
            locking = registration.Registration(Mapping(nbytes), _Timed(device, took), piece_bytes)
            began = time.perf_counter()
            locking.start(background=True)
            found = time_runs(work, functools.partial(locking.wait, 0))
            seconds = time.perf_counter() - began
            if locking.ready_bytes != nbytes:
                raise SystemExit("the memory could not be page-locked: see the error above")
            yield {
                "work": name,
                "piece_mib": piece_bytes // MIB,
                "gib_per_second": round(nbytes / GIB / seconds, 2),
                "registration_ms": {
                    key: round(1e3 * value, 3)
                    for key, value in percentiles(took).items()
                    if key != "count"
                },
                "ms": found,
            }
            began = time.perf_counter()
            locking.release()
            print(f"released in {time.perf_counter() - began:.2f} s", flush=True)


class _Timed(CudaRegistrar):
    """A registrar that times its registrations."""

    def __init__(self, device: Any, took: list[float]) -> None:
        super().__init__(device)
        self._took = took

    def register(self, address: int, nbytes: int) -> None:
        began = time.perf_counter()
        super().register(address, nbytes)
        self._took.append(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--gib", type=int, default=8, help="GiB to lock in each run")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    arguments = parser.parse_args()
    torch = cuda_torch()
    if torch is None:
        raise SystemExit("needs CuPy and torch with a CUDA device")
    nbytes = arguments.gib * GIB
    # Some machines start with less memory and grow, which is not measured here.
    mapping = Mapping(2 * nbytes)
    mapping.populate(0, mapping.nbytes)
    mapping.close()
    found = []
    for row in rows(torch, nbytes):
        found.append(row)
        print(row, flush=True)
        if arguments.out:
            facts = {"machine": machine(), "gib": arguments.gib, "rest": registration.REST}
            write_result(arguments.out, {**facts, "rows": found})


if __name__ == "__main__":
    main()
