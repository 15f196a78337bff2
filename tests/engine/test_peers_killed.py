"""Engines of one pool answer right whenever one of them is killed, stopped or restarted.

All engines are real, each in a separate process. A seed decides the moments; between two moments
every running engine must have answered something. `POOL_MOMENTS=200 pytest
tests/engine/test_peers_killed.py` runs longer, `POOL_SEED` sets the seed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload.tools.main import main
from tests.engine.harness import full_blocks, plain_answers, prompts_with_shared_prefix
from tests.engine.pool_moments import ENDED, PEERS_BYTES, ROUNDS, WRONG, Answered, Recovery, Work
from tests.support.processes import Process, kill_group, staying
from tests.support.waiting import wait_until

MOMENTS = int(os.environ.get("POOL_MOMENTS", "8"))
SEED = int(os.environ.get("POOL_SEED", "0"))
ROUNDS_BETWEEN = 2


class Pool:
    """Engines of one pool, and a record of events."""

    def __init__(self, models: Path, folder: Path, work: Work) -> None:
        self.models, self.folder, self.work = models, folder, work
        self.board = work.write(folder)
        self.happened: Counter[str] = Counter()
        self.recovered: list[Recovery] = []
        self._lives: dict[int, tuple[Process, contextlib.ExitStack]] = {}
        self._number = 0

    def start(self, number: int) -> Recovery:
        """Start an engine, and wait until it has served all that it could find."""
        self._number += 1
        own = self.folder / f"life {self._number}"
        own.mkdir()
        words = ("tests.engine.pool_moments", self.models, self.folder, number, self._number)
        ends = contextlib.ExitStack()
        process, said = ends.enter_context(staying(*words, folder=own, forks=True))
        self._lives[number] = process, ends
        return Recovery(**json.loads(said))

    def process(self, number: int) -> Process:
        return self._lives[number][0]

    def send(self, number: int, what: signal.Signals) -> None:
        os.killpg(self.process(number).pid, what)

    def proceed(self, numbers: list[int]) -> None:
        """Wait until engines have answered more; fail if one ends or hangs."""
        wanted = {number: self.board[number, ROUNDS] + ROUNDS_BETWEEN for number in numbers}
        for number in numbers:
            self._wait(number, lambda n=number: self.board[n, ROUNDS] >= wanted[n])

    def _wait(self, number: int, condition: Callable[[], bool]) -> None:
        process = self.process(number)

        def holds() -> bool:
            if process.poll() is not None and not condition():
                raise AssertionError(f"engine {number} has ended\n{self.errors()}")
            return condition()

        wait_until(holds, lambda: f"engine {number} hangs\n{self.errors()}")

    def errors(self) -> str:
        """Return the ends of the engines' output."""
        paths = sorted(self.folder.glob("life *"), key=lambda path: path.stat().st_mtime)
        return "\n".join((path / "err").read_text()[-3000:] for path in paths[-3:])

    def seats(self) -> list[dict[str, Any]]:
        """Return the output of `kv-offload pool`."""
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(["pool", "--path", str(self.folder), "--json"]) == 0
        seats: list[dict[str, Any]] = json.loads(shown.getvalue())
        return seats

    def restart(self, number: int, others: list[int]) -> None:
        """Kill an engine, let the others continue, and restart it."""
        kill_group(self.process(number))
        self._lives.pop(number)[1].close()
        wait_until(lambda: sum(seat["pid"] is None for seat in self.seats()) == 1)
        (left,) = [seat["readable_slots"] for seat in self.seats() if seat["pid"] is None]
        self.proceed(others)
        found = self.start(number)
        assert found.adopted >= 0.95 * left, (found, left)
        self.recovered.append(found)

    def moment(self, chance: random.Random, kind: str) -> None:
        """Do something to one or two engines at a random instant."""
        numbers = chance.sample(range(self.work.members), self.work.members)
        first, *others = numbers
        time.sleep(chance.uniform(0, 0.3))
        self.happened[kind] += 1
        if kind == "killed":
            self.restart(first, others)
        elif kind == "killed beside a stopped one":
            stopped, *others = others
            self.send(stopped, signal.SIGSTOP)
            self.restart(first, others)
            self.send(stopped, signal.SIGCONT)
        else:
            self.send(first, signal.SIGSTOP)
            self.proceed(others)
            self.send(first, signal.SIGCONT)
        self.proceed(numbers)
        assert not self.board[:, WRONG].any()

    def end(self) -> None:
        """Bring all engines to rest; each checks that no slot, lease or pin is left."""
        (self.folder / "rest").touch()
        for number in self._lives:
            self._wait(number, lambda n=number: self.board[n, ENDED] == 1)
        assert not self.board[:, WRONG].any()

    def close(self) -> None:
        for _, ends in self._lives.values():
            ends.close()


@contextlib.contextmanager
def pool_of(models: Path, folder: Path, work: Work) -> Iterator[Pool]:
    pool = Pool(models, folder, work)
    try:
        for number in range(work.members):
            pool.start(number)
        yield pool
    finally:
        pool.close()


def answered(models: Path, seeds: range) -> list[Answered]:
    sets = [prompts_with_shared_prefix(seed=seed) for seed in seeds]
    return [(prompts, plain_answers(models, prompts)) for prompts in sets]


def draw_kinds(chance: random.Random, moments: int) -> list[str]:
    """Return the events: each kind at least once; a restart takes the time of many stops."""
    kinds = ["killed", "killed beside a stopped one", "stopped", "stopped"]
    kinds += chance.choices(["killed", "stopped"], [1, 5], k=max(0, moments - len(kinds)))
    chance.shuffle(kinds)
    return kinds


@pytest.mark.slow  # `test_peers.py` has peers that are killed or stopped in `make test`
@pytest.mark.timeout(1800 + 60 * MOMENTS)
@pytest.mark.parametrize(
    ("members", "cpu_bytes", "fits"), [(2, "8MiB", True), (3, "1MiB", False)], ids=["all", "part"]
)
def test_engines_answer_right_whenever_one_is_killed_or_stopped(
    model_folder: Path, memory_folder: Path, members: int, cpu_bytes: str, fits: bool
) -> None:
    """Host memory has all blocks, which must be hits after a restart, or evicts all the time."""
    work = Work(
        members,
        cpu_bytes,
        answered(model_folder, range(1, 7)),
        answered(model_folder, range(20, 20 + members)),
    )
    chance = random.Random(f"{SEED} {members}")
    with pool_of(model_folder, memory_folder, work) as pool:
        slots = sum(seat["slots"] for seat in pool.seats())
        sets = [prompts for prompts, _ in work.common + work.own]
        assert (sum(map(full_blocks, sets)) < slots / members) is fits
        assert (sum(map(full_blocks, sets)) < slots) is fits
        for kind in draw_kinds(chance, MOMENTS // 2):
            pool.moment(chance, kind)
        for found in pool.recovered if fits else ():
            assert found.first_hit == 1, found
            assert found.hits >= 0.95, found
        assert pool.board[:, PEERS_BYTES].any(), "each served itself alone"
        pool.end()
    rounds = pool.board[:, ROUNDS].tolist()
    print(SimpleNamespace(happened=dict(pool.happened), rounds=rounds, recovered=pool.recovered))
