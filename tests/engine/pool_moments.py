"""Engines of one pool, each in a process, that answer random prompts until they are told to end.

usage: python -m tests.engine.pool_moments MODELS_FOLDER POOL_FOLDER NUMBER LIFE READY

The pool's folder has `work.json`: the sets of prompts, their answers, and the settings. An engine
answers the common sets and one that no other engine has, and empties its GPU cache after each. It
counts in a shared board, which survives when it is killed. It prints `Recovery` when it is ready.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.engine.harness import BLOCK_TOKENS, Engine, full_blocks, offloading
from tests.support.inputs import Tokens, random_tokens
from tests.support.waiting import wait_until

ROUNDS, WRONG, PEERS_BYTES, RESTS, ENDED = range(5)
FIELDS = 5

Board: TypeAlias = NDArray[np.int64]
Answered: TypeAlias = tuple[list[Tokens], list[Tokens]]
"""Prompts, and the answers of an engine without the plugin."""


@dataclass(frozen=True)
class Recovery:
    """What an engine found when it started."""

    adopted: int
    first_hit: float
    """Share of the full blocks of its own set's first prompt that were hits."""
    hits: float
    """Share of the full blocks of all its sets that it loaded, once it had found its peers."""


@dataclass(frozen=True)
class Work:
    """The input of all engines of a pool."""

    members: int
    cpu_bytes: str
    common: list[Answered]
    own: list[Answered]

    @classmethod
    def read(cls, folder: Path) -> Work:
        return cls(**json.loads((folder / "work.json").read_text()))

    def write(self, folder: Path) -> Board:
        """Write it for the engines, with a new board, which is returned."""
        (folder / "work.json").write_text(json.dumps(asdict(self)))
        return np.memmap(folder / "board", np.int64, "w+", shape=(self.members, FIELDS))

    def board(self, folder: Path) -> Board:
        return np.memmap(folder / "board", np.int64, "r+", shape=(self.members, FIELDS))


class Member:
    """An engine of the pool, in this process."""

    def __init__(self, running: Engine, sets: list[Answered], pool: Path, mine: Any) -> None:
        self.running, self.sets, self.pool, self.mine = running, sets, pool, mine
        self.from_peers = 0

    def serve(self, number: int) -> None:
        prompts, expected = self.sets[number]
        self.mine[WRONG] += self.running.generate(prompts) != expected
        self.running.reset_gpu_cache()
        read = int(self.running.totals["peers_read_bytes"])
        self.mine[PEERS_BYTES] += read - self.from_peers
        self.from_peers = read
        self.mine[ROUNDS] += 1

    def recover(self) -> Recovery:
        """Load what the previous engine left, then what the pool has."""
        running, (prompts, expected) = self.running, self.sets[0]
        adopted = int(running.offload.gauges()["adopted_slots"])
        self.mine[WRONG] += running.generate(prompts[:1]) != expected[:1]
        possible = (len(prompts[0]) - 1) // BLOCK_TOKENS
        first = running.cached_tokens[0] // BLOCK_TOKENS / possible
        running.reset_gpu_cache()
        return Recovery(adopted, first, self._hits())

    def _hits(self) -> float:
        others = len([*self.pool.glob("kv-offload-*/chat/seat-*/directory")]) - 1
        while self.running.offload.gauges()["peers"] < others:
            self.running.generate([random_tokens(3, seed=0)], max_tokens=1)
            time.sleep(0.02)
        before = self.running.blocks_loaded()
        for number in range(len(self.sets)):
            self.serve(number)
        self.running.settle()
        blocks = sum(full_blocks(prompts) for prompts, _ in self.sets)
        return (self.running.blocks_loaded() - before) / blocks

    def rest(self) -> None:
        """Settle all slots: each that holds KV is readable, and peers can read it.

        A slot that a peer leases when it is to be written becomes free with a later store.
        """
        manager = self.running.offload.manager
        for seed in range(1000, 1020):
            self.running.generate([random_tokens(4 * BLOCK_TOKENS, seed=seed)])
            self.running.reset_gpu_cache()
            self.running.settle()
            if len(manager.readable_slots()) == manager.slots_in_use:
                break
        assert len(manager.readable_slots()) == manager.slots_in_use
        assert self.running.offload.gauges().get("leased_slots", 0) == 0
        self.running.offload.check_integrity()
        manager.check_integrity()


def main(models: str, folder: str, number: str, life: str, ready: str) -> None:
    pool = Path(folder)
    work = Work.read(pool)
    mine = work.board(pool)[int(number)]
    plugin = {
        "cpu_bytes": work.cpu_bytes,
        "host_pool": "chat",
        "host_pool_path": folder,
        "load_or_recompute": "always_load",  # a small model computes faster
    }
    chance = random.Random(f"{number} {life}")
    with offloading(Path(models), plugin=plugin) as running:
        member = Member(running, [work.own[int(number)], *work.common], pool, mine)
        said = json.dumps(asdict(member.recover()))
        Path(f"{ready}.new").write_text(said)
        Path(f"{ready}.new").rename(ready)
        while not (pool / "rest").exists():
            member.serve(chance.randrange(len(member.sets)))
        # Until the other engines are idle, they may lease slots.
        running.settle()
        mine[RESTS] = 1
        wait_until(lambda: work.board(pool)[:, RESTS].all())
        member.rest()
    mine[ENDED] = 1


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        raise
