"""A process that changes a disk's index until it is killed.

Changes are numbered, so that what a kill leaves can be compared with the state after some of them.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kv_offload.cache.disk_index import DiskIndex, index

NUM_SLOTS = 512
MARK = 0
"""The slot whose key is the number of the last put."""


def change(number: int) -> tuple[str, list[int]]:
    """Return the operation of change `number`, and its slots."""
    numbers = random.Random(number)
    chosen = numbers.sample(range(1, NUM_SLOTS), numbers.randrange(1, 64))
    kind = ("put", "use", "remove")[number % 3]
    return kind, [*chosen, MARK] if kind == "put" else chosen[:8]


def keys(number: int, slots: Sequence[int]) -> list[bytes]:
    """Return the keys that put `number` gives to slots."""
    return [b"%d" % number if slot == MARK else b"%d in %d" % (number, slot) for slot in slots]


def expected(changes: int) -> list[tuple[bytes, int]]:
    """Return all keys and their slots after so many changes, the least recently used first."""
    held: dict[int, bytes] = {}
    for number in range(changes):
        kind, slots = change(number)
        before = {slot: held.pop(slot) for slot in slots if slot in held}
        if kind == "put":
            held |= zip(slots, keys(number, slots), strict=True)
        elif kind == "use":
            held |= {slot: before[slot] for slot in slots if slot in before}
    return [(key, slot) for slot, key in held.items()]


def open_index(path: Path) -> DiskIndex:
    return DiskIndex(path, {"model": "one"}, {}, NUM_SLOTS)


def last_put(found: DiskIndex) -> int:
    """Return the number of the last put that an index has, or -1."""
    marks = [key for key, slot in zip(found.keys, found.slots, strict=True) if slot == MARK]
    return int(*marks) if marks else -1


def put_until_killed(path: Path, commit_seconds: float, reset_after: int) -> None:
    """Continue after the last put in the index; write the number of changes to a file next to it.

    A reset follows after `reset_after` changes, unless that is negative.
    """
    index.COMMIT_SECONDS = commit_seconds
    running = open_index(path)
    done = np.memmap(path.with_suffix(".done"), np.int64, "w+", shape=(1,))
    for number in range(last_put(running) + 1, sys.maxsize):
        if number == reset_after:
            running.clear()
        kind, chosen = change(number)
        slots = np.array(chosen, np.int32)
        if kind == "put":
            running.put(keys(number, chosen), slots)
        else:
            getattr(running, kind)(slots)
        done[0] = number + 1
        time.sleep(0.0005)


if __name__ == "__main__":
    put_until_killed(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
