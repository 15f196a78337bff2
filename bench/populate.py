"""How long an `mmap` waits while threads give a mapping its pages: an experiment.

`python -m bench.populate [--gib 6] [--threads 4] [--repeats 2] [--out FILE.json]` gives as many GiB
their pages in each way by turns, while this thread maps and unmaps 64 KiB over and over. Needs no
GPU. Memory that a virtual machine has not used for a while (a minute was enough) comes slower by
far, and has been used afterwards: only the first row tells of it, and `--first` names its way.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from bench.swap_rows import machine
from transfer.mapping import Mapping

MIB, GIB = 1 << 20, 1 << 30
PIECE_BYTES = 256 * MIB
PAUSE_SECONDS = 0.0002

Row = dict[str, Any]


class CalledMapping(Mapping):
    """Private memory whose pages come by one call of the system."""

    def populate(self, offset: int, nbytes: int) -> None:
        self._give_pages(offset, nbytes)


WAYS: dict[str, tuple[type[Mapping], int]] = {
    "touched": (Mapping, 32 * MIB),
    "32 MiB a call": (CalledMapping, 32 * MIB),
    "2 MiB a call": (CalledMapping, 2 * MIB),
}
"""What makes the mapping, and the bytes that get pages at a time."""


def map_until(ended: threading.Event) -> list[float]:
    """Map and unmap until the event is set; return the milliseconds of each."""
    waits = []
    while not ended.is_set():
        began = time.perf_counter()
        with mmap.mmap(-1, 64 << 10) as memory:
            memory[0] = 1
        waits.append((time.perf_counter() - began) * 1e3)
        time.sleep(PAUSE_SECONDS)
    return waits


def populate(mapping: Mapping, step: int, threads: int) -> tuple[float, list[float]]:
    """Return the seconds in which all pages were there, and how long each `mmap` took meanwhile."""
    piece_bytes = max(PIECE_BYTES, step)
    pieces = iter(range(0, mapping.nbytes, piece_bytes))
    claim, ended = threading.Lock(), threading.Event()
    left = [threads]

    def work() -> None:
        while True:
            with claim:
                start = next(pieces, None)
                if start is None:
                    left[0] -= 1
                    if not left[0]:
                        ended.set()
                    return
            end = min(start + piece_bytes, mapping.nbytes)
            for offset in range(start, end, step):
                mapping.populate(offset, min(step, end - offset))

    began = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    waits = map_until(ended)
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return seconds, waits


def measure(way: str, nbytes: int, threads: int) -> Row:
    kind, step = WAYS[way]
    mapping = kind(nbytes)
    seconds, waits = populate(mapping, step, threads)
    mapping.close()
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
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--first", choices=WAYS, default="touched")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ways = sorted(WAYS, key=lambda way: way != arguments.first)
    rows = []
    for _ in range(arguments.repeats):
        for way in ways:
            rows.append(measure(way, int(arguments.gib * GIB), arguments.threads))
            print(", ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    if arguments.out:
        document = {
            "machine": machine(),
            "gib": arguments.gib,
            "threads": arguments.threads,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
