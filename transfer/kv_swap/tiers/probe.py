"""Measures a disk without a tier, writing and reading blocks with a tier's number of threads."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError, explain
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.disk import NUM_THREADS
from kv_swap.tiers.engine import TierDirection
from kv_swap.tiers.file import turn_direct
from kv_swap.tiers.workers import in_parallel

_MEMORY_BLOCKS = 8
"""Number of blocks that are written repeatedly; more than there are threads."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """The measured rates of a folder's disk."""

    direct: bool
    write_bytes_per_second: float
    read_bytes_per_second: float


def measure(path: Path, nbytes: int, block_bytes: int) -> DiskRates:
    """Write and read about `nbytes` in a folder, in blocks of the planned slots' size.

    Temporarily takes that space in an unnamed file, which leaves nothing on the disk. Uses direct
    I/O if blocks and filesystem allow it. Raises `TierError` if the folder or the disk cannot be
    used or has too little space.
    """
    num_blocks = max(1, nbytes // block_bytes)
    file_bytes = num_blocks * block_bytes
    memory = HostArena(_MEMORY_BLOCKS, block_bytes, register=None).view()
    # Random data, because a disk may compress.
    memory[:] = np.frombuffer(os.urandom(memory.nbytes), np.uint8).reshape(memory.shape)
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            fd = file.fileno()
            os.posix_fallocate(fd, 0, file_bytes)
            direct = turn_direct(fd, [memory[0].data], 0)
            rates = []
            for direction in (TierDirection.DEMOTE, TierDirection.PROMOTE):
                began = time.perf_counter()
                _move(fd, direction, num_blocks, memory)
                if not direct and direction is TierDirection.DEMOTE:
                    os.fsync(fd)
                rates.append(file_bytes / (time.perf_counter() - began))
                if not direct:
                    os.posix_fadvise(fd, 0, file_bytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise TierError(f"cannot measure {path} with {nbytes} bytes: {explain(error)}") from error
    return DiskRates(direct, *rates)


def _move(fd: int, direction: TierDirection, num_blocks: int, memory: NDArray[np.uint8]) -> None:
    """Write or read all blocks, one call each, with a tier's number of threads.

    `memory` is uint8 of shape `(n, block_bytes)`; block b is at row `b % n`. Raises `OSError`.
    """
    call = os.pwritev if direction is TierDirection.DEMOTE else os.preadv
    block_bytes = memory.shape[1]

    def move(block: int) -> None:
        call(fd, [memory[block % len(memory)].data], block * block_bytes)

    in_parallel(move, range(num_blocks), NUM_THREADS[direction])


def find_filesystem(path: Path) -> str:
    """Return the type of the filesystem of a path, such as ext4."""
    best, kind = -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Spaces and similar characters are escaped as octal numbers.
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), after.split()[0]
    return kind
