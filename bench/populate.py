"""How long an `mmap` waits while a pool is given its pages: an experiment.

`python -m bench.populate [--gib 6] [--repeats 2] [--out FILE.json]` gives as many GiB their pages
in each way by turns, on the threads that page-lock a pool, while this thread maps and unmaps 64 KiB
over and over. Nothing is locked, so it needs no GPU. Memory that a virtual machine has not used for
a while (a minute was enough) comes slower by far, and has been used afterwards: only the first row
tells of it, and `--first` names its way.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kv_swap.memory.mapping import Mapping
from kv_swap.memory.registration import NUM_THREADS, PIECE_BYTES, Registration

from bench.swap_rows import machine

MIB, GIB = 1 << 20, 1 << 30
PAUSE_SECONDS = 0.0002

Row = dict[str, Any]


class AskedMapping(Mapping):
    """Private memory whose pages come by calls of the system, of `call_bytes` each."""

    def __init__(self, nbytes: int, call_bytes: int) -> None:
        super().__init__(nbytes)
        self._call_bytes = call_bytes

    def populate(self, offset: int, nbytes: int) -> None:
        self._ask_for_pages(offset, nbytes, self._call_bytes)


class NoRegistrar:
    """Locks nothing."""

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


WAYS: dict[str, Callable[[int], Mapping]] = {
    "touched": Mapping,
    "32 MiB a call": lambda nbytes: AskedMapping(nbytes, 32 * MIB),
    "2 MiB a call": lambda nbytes: AskedMapping(nbytes, 2 * MIB),
}


def waits_beside(work: Callable[[], object]) -> tuple[float, list[float]]:
    """Map and unmap until `work`, on another thread, has ended.

    Returns its seconds and the milliseconds of each time.
    """
    waits = []
    thread = threading.Thread(target=work)
    started = time.perf_counter()
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        with mmap.mmap(-1, 64 << 10) as memory:
            memory[0] = 1
        waits.append((time.perf_counter() - began) * 1e3)
        time.sleep(PAUSE_SECONDS)
    return time.perf_counter() - started, waits


def measure(way: str, nbytes: int) -> Row:
    mapping = WAYS[way](nbytes)
    pool = Registration(mapping, NoRegistrar(), PIECE_BYTES)
    seconds, waits = waits_beside(lambda: pool.start(background=False))
    if pool.ready_bytes != mapping.nbytes:
        raise SystemExit("the memory could not be had: see the error above")
    pool.release()
    return {
        "way": way,
        "gib_per_second": round(nbytes / GIB / seconds, 2),
        "maps": len(waits),
        "map_p50_ms": round(statistics.median(waits), 3),
        "map_max_ms": round(max(waits), 1),
        "share_of_time_in_maps": round(sum(waits) / 1e3 / seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--first", choices=WAYS, default="touched")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ways = sorted(WAYS, key=lambda way: way != arguments.first)
    rows = []
    for _ in range(arguments.repeats):
        for way in ways:
            rows.append(measure(way, int(arguments.gib * GIB)))
            print(", ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    if arguments.out:
        document = {
            "machine": machine(),
            "gib": arguments.gib,
            "threads": min(NUM_THREADS, len(os.sched_getaffinity(0))),
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
