"""How long it takes to page-lock host memory, and how long that keeps an engine waiting.

usage: python -m bench.swap.pinning [--gib 8] [--out FILE.json]

Needs a CUDA device and twice as much free memory. Every row locks `--gib` GiB anew in the
background, while this thread does what a starting engine does, round after round: it launches small
kernels and captures a CUDA graph. The first row, of no pieces, is without locking.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import Mapping
from kv_swap.memory.numa import device_node

from bench.machine import cuda_torch, machine, write_result

MIB, GIB = 1 << 20, 1 << 30
PIECES = (64 * MIB, 256 * MIB, GIB)
RESTS = (0.0, 3.0, 7.0)
SETTLE_SECONDS = 2.0
"""Rounds that warm up, and as long again those of the first row."""

LAUNCHES, CAPTURED = 100, 20
"""Of a round, and of its graph."""


@dataclass(frozen=True)
class Row:
    """One run. Launches and captures are those of the main thread meanwhile."""

    piece_mib: int
    rest: float
    seconds: float
    gib_per_second: float
    slowdown: float
    """Time of a round over that of the first row, means."""
    launch_p50_us: float
    launch_max_us: float
    capture_p50_ms: float
    capture_max_ms: float


@dataclass
class Rounds:
    """Seconds of each launch, of each capture, and of each round."""

    launches: list[float]
    captures: list[float]
    rounds: list[float]


def time_rounds(torch: Any, until: Callable[[], bool]) -> Rounds:
    """Launch small kernels and capture a graph of some, over and over."""
    value = torch.zeros(16, device="cuda")
    stream = torch.cuda.Stream()
    found = Rounds([], [], [])
    clock = time.perf_counter
    while not until():
        began = clock()
        for _ in range(LAUNCHES):
            before = clock()
            value.add_(1)
            found.launches.append(clock() - before)
        # Else a full queue of launches makes the next one wait.
        torch.cuda.synchronize()
        before = clock()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            for _ in range(CAPTURED):
                value.add_(1)
            graph.capture_end()
        found.captures.append(clock() - before)
        found.rounds.append(clock() - began)
    return found


def make_row(
    found: Rounds, alone: Rounds, nbytes: int, seconds: float, piece_bytes: int, rest: float
) -> Row:
    return Row(
        piece_mib=piece_bytes // MIB,
        rest=rest,
        seconds=round(seconds, 3),
        gib_per_second=round(nbytes / GIB / seconds, 2),
        slowdown=round(statistics.mean(found.rounds) / statistics.mean(alone.rounds), 2),
        launch_p50_us=round(statistics.median(found.launches) * 1e6, 1),
        launch_max_us=round(max(found.launches) * 1e6, 1),
        capture_p50_ms=round(statistics.median(found.captures) * 1e3, 2),
        capture_max_ms=round(max(found.captures) * 1e3, 2),
    )


def measure(torch: Any, nbytes: int, node: int | None) -> Iterator[Row]:
    """Yield the row without locking, then one for each size of pieces and each rest."""
    begun = time.perf_counter()
    time_rounds(torch, lambda: time.perf_counter() > begun + SETTLE_SECONDS)
    alone = time_rounds(torch, lambda: time.perf_counter() > begun + 2 * SETTLE_SECONDS)
    yield make_row(alone, alone, 0, SETTLE_SECONDS, 0, 0.0)
    registrar = CudaRegistrar(torch.device("cuda", 0))
    usual_rest = registration.REST
    for piece_bytes in PIECES:
        for rest in RESTS:
            mapping = Mapping(nbytes, numa_node=node)
            registration.REST = rest
            work = registration.Registration(mapping, registrar, piece_bytes)
            started = time.perf_counter()
            work.start(background=True)
            found = time_rounds(torch, functools.partial(work.wait, 0))
            seconds = time.perf_counter() - started
            if work.ready_bytes != mapping.nbytes:
                raise SystemExit("the memory could not be page-locked: see the error above")
            work.release()
            registration.REST = usual_rest
            yield make_row(found, alone, nbytes, seconds, piece_bytes, rest)


def start_of_an_arena(torch: Any, nbytes: int, node: int | None) -> dict[str, float]:
    """Time what an engine's start waits for, and when all of the arena is ready."""
    registrar = CudaRegistrar(torch.device("cuda", 0))
    started = time.perf_counter()
    slot_bytes = 2 * MIB
    arena = HostArena(
        nbytes // slot_bytes, slot_bytes, register=registrar, background=True, numa_node=node
    )
    constructed = time.perf_counter() - started
    ready_slots = arena.ready_slots
    assert arena.wait_ready()
    return {
        "constructor_seconds": round(constructed, 3),
        "ready_share_then": round(ready_slots / arena.num_slots, 3),
        "all_ready_seconds": round(time.perf_counter() - started, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--gib", type=float, default=8, help="GiB to lock in each run")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    arguments = parser.parse_args()
    torch = cuda_torch()
    if torch is None:
        raise SystemExit("needs CuPy and torch with a CUDA device")
    nbytes = int(arguments.gib * GIB)
    node = device_node(CudaRegistrar(torch.device("cuda", 0)).pci_bus_id)

    # Some machines have less memory at first and grow: not what is measured.
    mapping = Mapping(2 * nbytes)
    mapping.populate(0, mapping.nbytes)
    mapping.close()

    print(" ".join(f"{name:>15}" for name in Row.__dataclass_fields__))
    rows = []
    for row in measure(torch, nbytes, node):
        rows.append(asdict(row))
        print(" ".join(f"{value!s:>15}" for value in rows[-1].values()), flush=True)
    start = start_of_an_arena(torch, nbytes, node)
    print(json.dumps(start))
    if arguments.out is not None:
        facts = {"machine": machine(), "gib": arguments.gib, "numa_node": node, "start": start}
        write_result(arguments.out, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
