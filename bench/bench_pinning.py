"""How long it takes to page-lock host memory, and how long that keeps an engine waiting.

`python bench/bench_pinning.py [--gib 8] [--out pinning.json]` needs a CUDA device and twice as much
free memory. Every row locks `--gib` GiB anew in the background, while this thread does what a
starting engine does, round after round: it launches small kernels and captures a CUDA graph. The
first row, of no thread, is without locking. It prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import Mapping
from kv_swap.memory.numa import device_node

from bench.swap_rows import cuda_torch, machine

MIB, GIB = 1 << 20, 1 << 30
PIECES = (64 * MIB, 256 * MIB, GIB)
RESTS = (0.0, 3.0, 7.0)
THREADS = (1, 2, 8)
SETTLE_SECONDS = 2.0
"""Rounds that warm up, and as long again those of the first row."""

LAUNCHES, CAPTURED = 100, 20
"""Of a round, and of its graph."""

_MADV_NOHUGEPAGE = 15
"""From linux/mman.h."""


@dataclass(frozen=True)
class Row:
    """One run. Launches and captures are those of the main thread meanwhile."""

    huge_pages: bool
    populate: bool
    piece_mib: int
    threads: int
    rest: float
    seconds: float
    gib_per_second: float
    slowdown: float
    """Time of a round over that of the first row, means."""
    launch_p50_us: float
    launch_p999_us: float
    launch_max_us: float
    capture_p50_ms: float
    capture_max_ms: float
    release_seconds: float


@dataclass
class Rounds:
    """Seconds of each launch, of each capture, and of each round."""

    launches: list[float]
    captures: list[float]
    rounds: list[float]


class PlainMapping(Mapping):
    """Memory as a registration finds it: with or without huge pages, with or without pages."""

    def __init__(self, nbytes: int, node: int | None, *, huge_pages: bool, populate: bool) -> None:
        super().__init__(nbytes, numa_node=node)
        self._populates = populate
        if not huge_pages:
            self._memory.madvise(_MADV_NOHUGEPAGE)

    def populate(self, offset: int, nbytes: int) -> None:
        if self._populates:
            super().populate(offset, nbytes)


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


def row(
    found: Rounds, round_alone: float, nbytes: int, seconds: float, release: float, **facts: Any
) -> Row:
    launches = sorted(found.launches)
    return Row(
        seconds=round(seconds, 3),
        gib_per_second=round(nbytes / GIB / seconds, 2),
        slowdown=round(statistics.mean(found.rounds) / round_alone, 2),
        launch_p50_us=round(statistics.median(launches) * 1e6, 1),
        launch_p999_us=round(launches[int(0.999 * (len(launches) - 1))] * 1e6, 1),
        launch_max_us=round(launches[-1] * 1e6, 1),
        capture_p50_ms=round(statistics.median(found.captures) * 1e3, 2),
        capture_max_ms=round(max(found.captures) * 1e3, 2),
        release_seconds=round(release, 3),
        **facts,
    )


def lock(
    torch: Any,
    round_alone: float,
    nbytes: int,
    node: int | None,
    *,
    huge_pages: bool = True,
    populate: bool = True,
    piece_bytes: int = registration.PIECE_BYTES,
    threads: int = registration.NUM_THREADS,
    rest: float = registration.REST,
) -> Row:
    """Lock `nbytes` in the background while rounds are timed."""
    mapping = PlainMapping(nbytes, node, huge_pages=huge_pages, populate=populate)
    registrar = CudaRegistrar(torch.device("cuda", 0))
    work = registration.Registration(mapping, registrar, piece_bytes, threads, rest)
    started = time.perf_counter()
    work.start(background=True)
    found = time_rounds(torch, lambda: work.wait(0))
    seconds = time.perf_counter() - started
    if work.ready_bytes != mapping.nbytes:
        raise SystemExit("the memory could not be page-locked: see the error above")
    released = time.perf_counter()
    work.release()
    return row(
        found,
        round_alone,
        nbytes,
        seconds,
        time.perf_counter() - released,
        huge_pages=huge_pages,
        populate=populate,
        piece_mib=piece_bytes // MIB,
        threads=threads,
        rest=rest,
    )


def measure(torch: Any, nbytes: int, node: int | None) -> Iterator[Row]:
    """Yield the row without locking, then one for each way to lock."""
    begun = time.perf_counter()
    time_rounds(torch, lambda: time.perf_counter() > begun + SETTLE_SECONDS)
    alone = time_rounds(torch, lambda: time.perf_counter() > begun + 2 * SETTLE_SECONDS)
    round_alone = statistics.mean(alone.rounds)
    none = {"huge_pages": False, "populate": False, "piece_mib": 0, "threads": 0, "rest": 0.0}
    yield row(alone, round_alone, 0, SETTLE_SECONDS, 0.0, **none)
    plans: list[dict[str, Any]] = [
        {"piece_bytes": piece, "rest": rest} for piece in PIECES for rest in RESTS
    ]
    plans += [{"threads": threads} for threads in THREADS]
    for huge_pages, populate in ((True, False), (False, True), (False, False)):
        plans.append({"huge_pages": huge_pages, "populate": populate})
    for plan in plans:
        yield lock(torch, round_alone, nbytes, node, **plan)


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


def copy_engine_across_a_border() -> str:
    """Say whether one `cudaMemcpyAsync` may cross from one registration to the next."""
    import cupy

    runtime = cupy.cuda.runtime
    mapping = Mapping(8 * mmap.PAGESIZE)
    half = mapping.nbytes // 2
    for offset in (0, half):
        runtime.hostRegister(mapping.address + offset, half, 3)
    target = cupy.cuda.Memory(mapping.nbytes)
    stream = cupy.cuda.Stream(non_blocking=True)
    try:
        runtime.memcpyAsync(
            target.ptr, mapping.address, mapping.nbytes, runtime.memcpyHostToDevice, stream.ptr
        )
        stream.synchronize()
    except RuntimeError as error:
        return str(error)
    finally:
        for offset in (0, half):
            runtime.hostUnregister(mapping.address + offset)
    return "works"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    for one in measure(torch, nbytes, node):
        rows.append(asdict(one))
        print(" ".join(f"{value!s:>15}" for value in rows[-1].values()), flush=True)
    document = {
        "machine": machine(),
        "gib": arguments.gib,
        "numa_node": node,
        "start": start_of_an_arena(torch, nbytes, node),
        "copy_engine_across_a_border": copy_engine_across_a_border(),
        "rows": rows,
    }
    print(json.dumps({name: value for name, value in document.items() if name != "rows"}, indent=1))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
