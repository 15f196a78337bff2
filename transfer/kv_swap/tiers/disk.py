"""A tier in a file on a disk: records as `record.py` says, moved by the threads of `workers.py`.

Nothing is flushed. A record that was not wholly written, for whatever reason, is a mismatch when it
is read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_swap.tiers.engine import TierEngine
from kv_swap.tiers.file import open_file
from kv_swap.tiers.transfers import NUM_THREADS, Transfers, chunk_slots


class DiskTier(TierEngine):
    """Moves slots between an arena and a file, which it makes, or goes on with.

    `path` is the file. `arena` is a view of a `HostArena`, uint8 of `(slots, slot_bytes)`, which
    keeps the memory alive. `description` is all that changes what the bytes of a slot mean. The
    file takes all its space at once, and is locked as long as a thread may use it.

    `file_id` is random, made when the file was begun. `continued` says whether there was a file
    that goes on, and `reason` why not. `direct` says whether the disk reads and writes the arena
    itself; if slots are no multiple of 512 bytes, or the filesystem refuses, the kernel copies.

    Raises `TierError` if the file cannot be had: no folder, no permission, no space, a filesystem
    that is read-only, something else of that name, another engine that uses it.
    """

    def __init__(
        self,
        path: Path,
        num_slots: int,
        arena: NDArray[np.uint8],
        description: Mapping[str, str],
    ) -> None:
        file = open_file(path, num_slots, arena, description)
        self.file_id = file.content.file_id
        self.reason = file.reason
        self.continued = not file.reason
        self.direct = file.direct
        movers = {
            way: [Transfers(file) for _ in range(count)] for way, count in NUM_THREADS.items()
        }
        release = functools.partial(os.close, file.fd)
        super().__init__(num_slots, arena.shape, movers, chunk_slots(arena.shape[1]), release)
