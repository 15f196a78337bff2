"""A tier with an arena, on a disk or in a store, and blocks whose bytes follow from their names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.disk import DiskTier
from kv_swap.tiers.engine import TierCompletion, TierDirection, TierEngine, TierJob
from kv_swap.tiers.remote.client import RemoteClient
from kv_swap.tiers.remote.folder import FolderClient
from kv_swap.tiers.remote.mooncake import MooncakeClient
from kv_swap.tiers.remote.s3 import S3Client
from kv_swap.tiers.remote.tier import RemoteTier

DEMOTE, PROMOTE = TierDirection.DEMOTE, TierDirection.PROMOTE

ALIGNED, SECTORS, ODD = 16384, 5 * 512, 5000
"""Slots of whole pages, of whole sectors on many disks, and of neither: no direct I/O is possible.
"""


def block(name: bytes, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of the block with this name."""
    return np.frombuffer(hashlib.shake_128(name).digest(nbytes), np.uint8)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a byte in a file, which damages any byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def job(
    job_id: int, direction: TierDirection, pairs: Sequence[tuple[int, int]], names: Sequence[bytes]
) -> TierJob:
    return TierJob(job_id, direction, np.array(pairs, np.int32), names)


class Bed:
    """A tier and its arena; a context manager."""

    tier: TierEngine

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.arena = HostArena(num_slots, slot_bytes, register=None)
        self.view = self.arena.view()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()

    def run(
        self, direction: TierDirection, pairs: Sequence[tuple[int, int]], names: Sequence[bytes]
    ) -> TierCompletion:
        """Run a job to completion."""
        self.tier.submit(job(1, direction, pairs, names))
        assert self.tier.wait(60)
        (done,) = self.tier.poll()
        return done

    def put(self, names: dict[int, bytes]) -> TierCompletion:
        """Demote each name's block to its slot of the tier, from the same slot of the arena."""
        for slot, name in names.items():
            self.view[slot] = block(name, self.slot_bytes)
        return self.run(DEMOTE, [(slot, slot) for slot in names], list(names.values()))

    def get(self, names: dict[int, bytes]) -> TierCompletion:
        """Promote slots of the tier to the same slots of the arena, which are cleared first."""
        self.view[:] = 0
        return self.run(PROMOTE, [(slot, slot) for slot in names], list(names.values()))

    def right(self, names: dict[int, bytes]) -> list[int]:
        """Return the slots of the arena that hold the block of their name."""
        return [
            slot
            for slot, name in names.items()
            if np.array_equal(self.view[slot], block(name, self.slot_bytes))
        ]


class TierBed(Bed):
    """A tier in `path` with as many slots as its arena."""

    def __init__(
        self, path: Path, num_slots: int = 8, slot_bytes: int = ALIGNED, **description: str
    ) -> None:
        super().__init__(num_slots, slot_bytes)
        self.tier: DiskTier = DiskTier(path, num_slots, self.view, description)


class RemoteBed(Bed):
    """A tier in a remote store; `client` says how many bytes all may use together."""

    def __init__(
        self,
        client: RemoteClient,
        num_slots: int = 8,
        slot_bytes: int = ALIGNED,
        **description: str,
    ) -> None:
        super().__init__(num_slots, slot_bytes)
        self.client: Any = client
        self.tier: RemoteTier = RemoteTier(client, self.view, description)


class FolderBed(RemoteBed):
    def __init__(self, place: Path, *shape: int, max_bytes: int = 1 << 40, **more: str) -> None:
        super().__init__(FolderClient(place, max_bytes), *shape, **more)


class S3Bed(RemoteBed):
    def __init__(self, url: str, *shape: int, max_bytes: int = 1 << 40, **more: str) -> None:
        super().__init__(S3Client(url, max_bytes), *shape, **more)


class MooncakeBed(RemoteBed):
    """Gives `segment_bytes` to the store of a master."""

    def __init__(self, master: str, segment_bytes: int = 0, *shape: int, **more: str) -> None:
        super().__init__(MooncakeClient(master, segment_bytes), *shape, **more)


def named(count: int, what: str = "block") -> dict[int, bytes]:
    """Return a name for each of the first slots."""
    return {slot: f"{what} {slot}".encode() for slot in range(count)}
