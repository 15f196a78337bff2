"""Calls for `LLM.collective_rpc` that make the copies of some ranks fail, or take very long.

They work on any device, between steps. The destination of a copy that is reported as failed is
overwritten, so that an answer is wrong if anything reads it.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError, JobError

from kv_offload.engines.vllm.locate import worker_of_process
from kv_offload.scheduler.loads import decision
from tests.engine.rank_calls import pages

EVERY = 4
"""One in this many copies of each kind fails."""
TIMES_SLOWER = 100
GARBAGE = 0x7F
LAG_CYCLES = 20_000_000
"""About 10 ms on an H100 or H200."""

# The engine core imports this module before it calls a function of it. Since small loads are fast,
# it would hardly ever choose an asynchronous one.
_chance = random.Random(3)
decision.is_synchronous = lambda _costs: _chance.random() < 0.5


def disturb(_worker: Any, ranks: list[int], how: str | None) -> None:
    """From now on, make these ranks faulty as `how` says, and all others well.

    `fail`, `slow`, or `die`: by SIGKILL, just after a load starts while a store is in flight.
    """
    half = worker_of_process()
    if not hasattr(half, "disturbed"):
        half.disturbed = DisturbedCopies(half)
    half.disturbed.how = how if half.rank in ranks else None
    half.disturbed.happened.clear()


def happened(_worker: Any) -> dict[str, Any]:
    """Return what this rank has copied, and what failed, since the last call of `disturb`."""
    half = worker_of_process()
    assert half.transfer.wait(120)
    return dict(half.disturbed.happened)


def lag(worker: Any, ranks: list[int]) -> None:
    """From now on, have the GPUs of these ranks start each step late."""
    runner = worker.model_runner
    if worker.rank in ranks:
        execute_model = runner.execute_model

        def late(*given: Any, **named: Any) -> Any:
            torch.cuda._sleep(LAG_CYCLES)
            return execute_model(*given, **named)

        runner.execute_model = late


def mix_up(_worker: Any) -> None:
    """Rotate the bytes of all slots."""
    half = worker_of_process()
    assert half.transfer.wait(120)
    if not half.rank % half.sharing_ranks:
        slots = half.transfer.slots()
        slots[:] = torch.from_numpy(slots).roll(7, 0).numpy()


def places(_worker: Any) -> dict[str, Any]:
    """Return this rank's process, and the inodes of the shared memory that it maps."""
    maps = Path("/proc/self/maps").read_text()
    shared = sorted(set(re.findall(r"[0-9]+ +/memfd:kv-swap", maps)))
    return {"rank": worker_of_process().rank, "pid": os.getpid(), "shared": shared}


class DisturbedCopies:
    """Wraps a rank's transfer engine."""

    def __init__(self, half: Any) -> None:
        self.how: str | None = None
        self.happened: Counter[str] = Counter()
        self._half = half
        self._transfer = half.transfer
        self._seconds: dict[Direction, list[float]] = {way: [] for way in Direction}
        self._running: dict[int, SwapJob] = {}
        self._late: deque[tuple[float, SwapJob]] = deque()
        self._submit, self._poll, self._wait = (
            getattr(self._transfer, name) for name in ("submit", "poll", "wait")
        )
        for name in ("submit", "poll", "wait"):
            setattr(self._transfer, name, getattr(self, name))

    def submit(self, job: SwapJob) -> None:
        kind = "synchronous load" if job.before_compute else job.direction.value
        self.happened[kind] += 1
        fails = self.how == "fail" and self.happened[kind] % EVERY == 0
        if fails and (job.before_compute or self.happened[kind] % (2 * EVERY) == 0):
            # A synchronous load must fail before the forward reads its blocks.
            self.happened[f"{kind} refused"] += 1
            raise JobError("injected fault: refused")
        if fails:
            self._running[job.job_id] = job
        if self.how == "slow":
            known = self._seconds[job.direction]
            delay = (TIMES_SLOWER - 1) * (sum(known) / len(known) if known else 0.0)
            self.happened[f"{kind} slow"] += delay > 0
            if not job.before_compute:
                self._late.append((time.monotonic() + delay, job))
                return
            time.sleep(delay)
        stores = self._transfer.in_flight
        self._submit(job)
        if self.how == "die" and job.direction is Direction.LOAD and stores:
            os.kill(os.getpid(), signal.SIGKILL)

    def poll(self) -> list[Completion]:
        self._start_late(time.monotonic())
        return [self._end(done) for done in self._poll()]

    def wait(self, timeout_seconds: float) -> bool:
        self._start_late(float("inf"))
        return bool(self._wait(timeout_seconds))

    def _start_late(self, now: float) -> None:
        while self._late and self._late[0][0] <= now:
            self._submit(self._late.popleft()[1])

    def _end(self, done: Completion) -> Completion:
        job = self._running.pop(done.job_id, None)
        if job is None:
            if self.how is None and done.error is None:
                self._seconds[done.direction].append(done.seconds)
            return done
        self.happened[f"{job.direction.value} failed"] += 1
        if job.direction is Direction.LOAD:
            for block in job.pairs[:, 0].tolist():
                for page in pages(self._half, block):
                    page.fill_(GARBAGE)  # on the stream that compute uses
        else:
            self._transfer.slots()[job.pairs[:, 1]] = GARBAGE
        return dataclasses.replace(done, error=CopyError("injected fault: failed"))
