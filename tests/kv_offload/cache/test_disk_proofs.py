"""What is on a disk is believed only with proof, whatever has become of index and data file.

Each value of either is flipped, cut or replaced by what it was before a reset. Then a start serves
the bytes that were written under a key, or nothing; never an error, never another block.
`FLIPS=20000` tries more.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_swap.errors import TierError
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.disk import DiskTier
from kv_swap.tiers.engine import TierDirection, TierJob

from kv_offload.cache.disk_index import DiskIndex
from tests.support.waiting import LIMIT_SECONDS

NUM_SLOTS = 4
SLOT_BYTES = 4096
KEYS = [b"key %d" % number for number in range(NUM_SLOTS)]
BLOCKS = {key: bytes([1 + number]) * SLOT_BYTES for number, key in enumerate(KEYS)}
DESCRIPTION = {"model": "one"}
INDEX, DATA = "index.sqlite", "rank-0.kv"


class Start:
    """An engine's start: the rank opens its file, then the scheduler opens the index."""

    def __init__(self, folder: Path) -> None:
        self.view = HostArena(NUM_SLOTS, SLOT_BYTES, register=None).view()
        self.tier = DiskTier(folder / DATA, NUM_SLOTS, self.view, DESCRIPTION)
        files = {"0": self.tier.file_id}
        self.index = DiskIndex(folder / INDEX, DESCRIPTION, files, NUM_SLOTS)

    def end(self) -> None:
        self.index.close(LIMIT_SECONDS)
        self.tier.close(LIMIT_SECONDS)

    def move(self, way: TierDirection, keys: list[bytes], slots: list[int]) -> list[int]:
        names = [self.index.generation + key for key in keys]
        self.tier.submit(TierJob(1, way, np.array([slots, slots], np.int32).T, names))
        assert self.tier.wait(LIMIT_SECONDS)
        (done,) = self.tier.poll()
        return list(done.failed)

    def write(self, blocks: dict[bytes, bytes]) -> None:
        slots = list(range(len(blocks)))
        for slot, block in zip(slots, blocks.values(), strict=True):
            self.view[slot] = np.frombuffer(block, np.uint8)
        assert self.move(TierDirection.DEMOTE, [*blocks], slots) == []
        self.index.put([*blocks], np.array(slots, np.int32))

    def serve(self) -> dict[bytes, bytes]:
        keys, slots = self.index.keys, self.index.slots.tolist()
        if not keys:
            return {}
        failed = self.move(TierDirection.PROMOTE, keys, slots)
        return {
            key: self.view[slot].tobytes()
            for row, (key, slot) in enumerate(zip(keys, slots, strict=True))
            if row not in failed
        }


def served(folder: Path) -> dict[bytes, bytes]:
    start = Start(folder)
    try:
        return start.serve()
    finally:
        start.end()


@pytest.fixture
def disk(memory_folder: Path) -> Path:
    folder = memory_folder / "disk"
    folder.mkdir()
    first = Start(folder)
    first.write(BLOCKS)
    first.end()
    assert served(folder) == BLOCKS
    return folder


def damages(content: bytes) -> Iterator[bytes]:
    """Flip bits where there is something, and elsewhere; cut the file, or blank a page of it."""
    numbers = random.Random(7)
    filled = np.flatnonzero(np.frombuffer(content, np.uint8)).tolist()
    for count in range(int(os.environ.get("FLIPS", "64"))):
        harmed, at = bytearray(content), numbers.choice(filled)
        if count % 8 == 0:
            del harmed[numbers.choice([at, len(content) // 4096 * 4096 // 2]) :]
        elif count % 8 == 1:
            page = numbers.randrange(len(content)) // 4096 * 4096
            harmed[page : page + 4096] = bytes(len(harmed[page : page + 4096]))
        else:
            at = at if count % 8 > 2 else numbers.randrange(len(content))
            harmed[at] ^= 1 << numbers.randrange(8)
        yield bytes(harmed)


def tried(disk: Path, folder: Path) -> dict[bytes, bytes] | None:
    """Serve from a copy; None where the engine refuses a file, which is left as it is."""
    try:
        return served(folder)
    except TierError as error:
        if "no tier has made it" not in str(error):
            raise
        return None


@pytest.mark.parametrize("file", [INDEX, DATA])
def test_whatever_is_damaged_serves_what_was_written_or_nothing(disk, file):
    whole, counts = (disk / file).read_bytes(), set[int | None]()
    for number, harmed in enumerate(damages(whole)):
        folder = disk.parent / str(number)
        shutil.copytree(disk, folder)
        (folder / file).write_bytes(harmed)
        found = tried(disk, folder)
        assert (found or {}).items() <= BLOCKS.items()
        counts.add(None if found is None else len(found))
        shutil.rmtree(folder)
    assert {0, NUM_SLOTS - 1, NUM_SLOTS} <= counts, "damage of all kinds"


def reset(disk: Path, *, ranks: bool, index: bool) -> None:
    """Let an engine reset, as far as its parts can, and serve other weights until it is killed."""
    running = Start(disk)
    before = (disk / INDEX).read_bytes()
    if ranks:
        assert running.tier.revoke(LIMIT_SECONDS) == ""
    running.index.clear()
    assert running.index.wait_ended(LIMIT_SECONDS)
    running.write({KEYS[0]: b"\x55" * SLOT_BYTES})
    assert running.move(TierDirection.PROMOTE, KEYS[:1], [0]) == [], "this process finds it"
    running.end()
    if not index:
        (disk / INDEX).write_bytes(before)


@pytest.mark.parametrize(
    ("ranks", "index"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_after_a_reset_one_proof_that_is_gone_is_enough(disk, ranks, index):
    """Ends with the control: where neither could be taken away, old blocks are served."""
    reset(disk, ranks=ranks, index=index)
    expected = {} if ranks or index else {key: BLOCKS[key] for key in KEYS[1:]}
    assert served(disk) == expected


def test_after_a_reset_nothing_brings_old_blocks_back(disk):
    """An index that was restored, damaged or not, and data that is damaged."""
    reset(disk, ranks=True, index=False)
    files = [(file, (disk / file).read_bytes()) for file in (INDEX, DATA)]
    for file, whole in files:
        for number, harmed in enumerate(damages(whole)):
            folder = disk.parent / f"{file}.{number}"
            shutil.copytree(disk, folder)
            (folder / file).write_bytes(harmed)
            assert not tried(disk, folder)
            shutil.rmtree(folder)
