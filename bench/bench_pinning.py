"""How long it takes to page-lock host memory, and how long that keeps a launch waiting.

`python bench/bench_pinning.py [--gib 8] [--out pinning.json]` needs a CUDA device and twice as much
free memory. Every row locks `--gib` GiB anew while this thread launches small kernels and times
each launch; the first row, of no thread, launches only. It prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.swap_rows import cuda_torch, machine
from transfer.mapping import Mapping
from transfer.numa import device_node
from transfer.pinned import CudaRegistrar, HostArena
from transfer.registration import Registration

MIB, GIB = 1 << 20, 1 << 30
PIECES = (64 * MIB, 256 * MIB, GIB)
THREADS = (1, 2, 4, 8)
SETTLE_SECONDS = 2.0
"""Launches that warm up, and as long again those of the first row."""

_MADV_NOHUGEPAGE = 15
"""From linux/mman.h."""


@dataclass(frozen=True)
class Row:
    """One run. Stalls are of a launch on the main thread, in microseconds."""

    huge_pages: bool
    populate: bool
    piece_mib: int
    threads: int
    seconds: float
    gib_per_second: float
    stall_max_us: float
    stall_p999_us: float
    stall_p50_us: float
    release_seconds: float


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


def time_launches(torch: Any, until: Callable[[], bool]) -> list[float]:
    """Launch a small kernel over and over; return the microseconds of each launch."""
    value = torch.zeros(16, device="cuda")
    stalls = []
    while not until():
        for _ in range(100):
            before = time.perf_counter()
            value.add_(1)
            stalls.append((time.perf_counter() - before) * 1e6)
        # Else a full queue of launches makes the next one wait.
        torch.cuda.synchronize()
    return stalls


def row(stalls: list[float], nbytes: int, seconds: float, release: float, **facts: Any) -> Row:
    stalls.sort()
    return Row(
        seconds=round(seconds, 3),
        gib_per_second=round(nbytes / GIB / seconds, 2) if nbytes else 0.0,
        stall_max_us=round(stalls[-1], 1),
        stall_p999_us=round(stalls[int(0.999 * (len(stalls) - 1))], 1),
        stall_p50_us=round(statistics.median(stalls), 1),
        release_seconds=round(release, 3),
        **facts,
    )


def lock(
    torch: Any,
    nbytes: int,
    node: int | None,
    *,
    huge_pages: bool,
    populate: bool,
    piece_bytes: int,
    threads: int,
) -> Row:
    """Lock `nbytes` on `threads` threads while launches are timed."""
    mapping = PlainMapping(nbytes, node, huge_pages=huge_pages, populate=populate)
    registrar = CudaRegistrar(torch.device("cuda", 0))
    work = Registration(mapping, registrar, piece_bytes, threads)
    ended: list[float] = []

    def run() -> None:
        # The first piece, which `start` registers itself, belongs to the time.
        work.start(background=False)
        ended.append(time.perf_counter())

    started = time.perf_counter()
    thread = threading.Thread(target=run)
    thread.start()
    stalls = time_launches(torch, lambda: not thread.is_alive())
    thread.join()
    if not ended or work.ready_bytes != mapping.nbytes:
        raise SystemExit("the memory could not be page-locked: see the error above")
    released = time.perf_counter()
    work.release()
    return row(
        stalls,
        nbytes,
        ended[0] - started,
        time.perf_counter() - released,
        huge_pages=huge_pages,
        populate=populate,
        piece_mib=piece_bytes // MIB,
        threads=threads,
    )


def measure(torch: Any, nbytes: int, node: int | None) -> Iterator[Row]:
    """Yield the row without a registration, then one for each way to register."""
    begun = time.perf_counter()
    time_launches(torch, lambda: time.perf_counter() > begun + SETTLE_SECONDS)
    stalls = time_launches(torch, lambda: time.perf_counter() > begun + 2 * SETTLE_SECONDS)
    alone = {"huge_pages": False, "populate": False, "piece_mib": 0, "threads": 0}
    yield row(stalls, 0, SETTLE_SECONDS, 0.0, **alone)
    plans = [(True, True, piece, threads) for piece in PIECES for threads in THREADS]
    for huge_pages, populate in ((True, False), (False, True), (False, False)):
        plans += [(huge_pages, populate, 256 * MIB, threads) for threads in THREADS]
    for huge_pages, populate, piece_bytes, threads in plans:
        yield lock(
            torch,
            nbytes,
            node,
            huge_pages=huge_pages,
            populate=populate,
            piece_bytes=piece_bytes,
            threads=threads,
        )


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
