"""Processes with a pool are killed at every kind of moment; each next one finds whole blocks.

A process runs a manager with its directory over an arena in a file, and writes and reads slots as a
rank does: word by word, later than planned. It kills itself with SIGKILL as the trace function of
Python has seen so many lines; the numbers are drawn with a fixed seed. The next process adopts what
it left, checks each byte, and goes on until it is killed. All are forked by a new Python: copying a
process that has imported vLLM takes longer than what they do.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from kv_swap.memory.arena import HostArena
from kv_swap.memory.arena_file import ArenaFiles

from kv_offload.cache import directory
from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slots import NO_SLOTS, Slots
from tests.support.processes import run_function

NUM_SLOTS, WORDS = 24, 16
KILLS = 200
TRACED = ("directory.py", "lasting.py", "manager.py", os.path.basename(__file__))


def content_of(key: bytes) -> np.ndarray:
    """Return the words of a block: of a key they are always the same, and no other key's."""
    return np.random.default_rng(list(key)).integers(0, 2**63, WORDS, np.uint64)


class Life:
    """One process of the pool."""

    def __init__(self, folder: Path, seed: int, board: mmap.mmap) -> None:
        self.chance = random.Random(seed)
        self.board = np.frombuffer(board, np.int64)
        files = ArenaFiles(folder, 0, "kind", reserve=True)
        shared = files.create(NUM_SLOTS * WORDS * 8)
        with shared:
            self.arena = HostArena(NUM_SLOTS, WORDS * 8, register=None, shared=shared)
        self.words = self.arena.view().view(np.uint64)
        self.manager = LastingManager(make_policy("lru", NUM_SLOTS))
        self.manager.limit_slots(0)
        self.manager.open({0: folder / shared.name})
        for ready in (5, 20, NUM_SLOTS):  # as page-locking goes on
            self.manager.limit_slots(ready)
        self.check()
        self.board[0] = self.manager.adopted_slots
        self.planned: list[tuple[Slots, list[bytes]]] = []

    def check(self) -> None:
        """Check each block that can be read, byte by byte."""
        self.manager.check_integrity()
        for key, slot in self.manager.readable_slots().items():
            assert isinstance(key, bytes)
            assert (self.words[slot] == content_of(key)).all()

    def step(self) -> None:
        """Plan a store, write what was planned before, or end it; at times read or forget."""
        chance, manager = self.chance, self.manager
        if chance.random() < 0.5:
            first = chance.randrange(40)
            keys = [b"key %d" % number for number in range(first, first + chance.randrange(1, 6))]
            new = [key for key in keys if key not in manager]
            old = manager.find([key for key in keys if manager.readable([key]).all()])
            before = manager.evictions
            slots = manager.prepare_store(new, old if chance.random() < 0.5 else NO_SLOTS)
            self.board[2] += manager.evictions - before
            self.planned.append((slots, new[: len(slots)]))
        if self.planned and chance.random() < 0.6:
            slots, keys = self.planned.pop(chance.randrange(len(self.planned)))
            ok = chance.random() < 0.9
            for slot, key in zip(slots.tolist(), keys, strict=True):
                content = content_of(key)
                for word in range(WORDS if ok else WORDS // 2):
                    self.words[slot, word] = content[word]
            manager.complete_store(slots, ok=ok)
        readable = [*manager.readable_slots()]
        self.board[1] = len(readable)
        if readable and chance.random() < 0.3:
            manager.complete_load(manager.prepare_load(chance.sample(readable, 1)))


def live(folder: Path, seed: int, lines: int, board: mmap.mmap) -> None:
    """Be a process until so many lines have run."""

    def act() -> None:
        life = Life(folder, seed, board)
        while True:
            life.step()

    act_until_killed(act, lines, TRACED)


def act_until_killed(act: Callable[[], None], lines: int, traced: tuple[str, ...]) -> None:
    """Run so many lines of files with these endings; end with SIGKILL, or with 1 after an error."""
    left = lines

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if not frame.f_code.co_filename.endswith(traced):
            return None
        left -= event == "line"
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    try:
        sys.settrace(trace)
        act()
    except BaseException as error:  # noqa: BLE001 - this is a copy of the process that runs tests
        sys.settrace(None)
        os.write(2, repr(error).encode())
        os._exit(1)


def kill_lives(folder: str) -> list[int]:
    """Return how many blocks were adopted, of how many, and how many were evicted last."""
    board = mmap.mmap(-1, mmap.PAGESIZE)
    counts = np.frombuffer(board, np.int64)
    chance, adopted, readable = random.Random(51), 0, 0
    for number in range(KILLS):
        # Few lines end a process while it adopts, many while it stores and evicts.
        lines = chance.randrange(20, 400 if number % 2 else 9000)
        was_readable, counts[0] = int(counts[1]), -1
        process = os.fork()
        if not process:
            live(Path(folder), 1000 + number, lines, board)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), f"life {number} ended with an error"
        assert os.WTERMSIG(status) == signal.SIGKILL
        if counts[0] >= 0:  # it lived to say what it adopted
            adopted += int(counts[0])
            readable += was_readable
    return [adopted, readable, int(counts[2])]


def test_no_process_that_was_killed_leaves_a_block_that_is_not_whole(tmp_path: Path) -> None:
    adopted, readable, evicted = run_function(kill_lives, tmp_path, forks=False)
    print(adopted, readable, evicted)
    assert readable > 1000  # 0.98 of 4,000 are adopted
    # What was readable when the step began in which the process ended, less what that step evicted.
    assert adopted >= 0.95 * readable
    assert [path.name for path in tmp_path.glob("rank-*")] != []
    assert len([*tmp_path.glob(f"{directory.DIRECTORY}*")]) <= 2
