"""Measures a disk without a tier: as many threads as a tier has write and read blocks."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError, explain
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.engine import TierDirection
from kv_swap.tiers.file import turn_direct
from kv_swap.tiers.transfers import NUM_THREADS

_MEMORY_BLOCKS = 8
"""Number of blocks that are written repeatedly; more than there are threads."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """The measured rates of a folder's disk."""

    direct: bool
    write_bytes_per_second: float
    read_bytes_per_second: float


class PlainFile:
    """An unnamed file of blocks in a folder, which disappears on close. A context manager.

    Uses direct I/O if blocks and filesystem allow it. Methods raise `OSError`.
    """

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._num_blocks = num_blocks
        self.nbytes = num_blocks * block_bytes
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.nbytes)
            block = HostArena(1, block_bytes, register=None).view()[0].data
            self.direct = turn_direct(self._file.fileno(), [block], 0)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def move(self, direction: TierDirection, memory: NDArray[np.uint8]) -> float:
        """Write or read all blocks, one call each, with as many threads as a tier; return seconds.

        `memory` is uint8 of shape `(n, block_bytes)`; block b is at row `b % n`.
        """
        fd, demotes = self._file.fileno(), direction is TierDirection.DEMOTE
        call = os.pwritev if demotes else os.preadv
        blocks, errors = iter(range(self._num_blocks)), list[OSError]()
        block_bytes = memory.shape[1]

        def work() -> None:
            try:
                for block in blocks:
                    call(fd, [memory[block % len(memory)].data], block * block_bytes)
            except OSError as error:
                errors.append(error)

        if not self.direct:
            os.posix_fadvise(fd, 0, self.nbytes, os.POSIX_FADV_DONTNEED)
        threads = [threading.Thread(target=work) for _ in range(NUM_THREADS[direction])]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if demotes and not self.direct:
            os.fsync(fd)
        return time.perf_counter() - began


def measure(path: Path, nbytes: int, block_bytes: int) -> DiskRates:
    """Write and read about `nbytes` in a folder, in blocks of the size of the planned slots.

    Temporarily takes that space in an unnamed file, which leaves nothing on the disk. Raises
    `TierError` if the folder, the space or the disk does not allow it.
    """
    num_blocks = max(1, nbytes // block_bytes)
    memory = HostArena(_MEMORY_BLOCKS, block_bytes, register=None).view()
    # Random data, because a disk may compress.
    memory[:] = np.frombuffer(os.urandom(memory.nbytes), np.uint8).reshape(memory.shape)
    try:
        with PlainFile(path, num_blocks, block_bytes) as file:
            written = file.move(TierDirection.DEMOTE, memory)
            read = file.move(TierDirection.PROMOTE, memory)
    except OSError as error:
        raise TierError(f"cannot measure {path} with {nbytes} bytes: {explain(error)}") from error
    return DiskRates(file.direct, file.nbytes / written, file.nbytes / read)


def find_filesystem(path: Path) -> str:
    """Return the type of the filesystem of a path, such as ext4."""
    best, kind = -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Spaces and similar characters are written as octal numbers.
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.resolve().is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), after.split()[0]
    return kind
