"""Hold and fail the copies of an engine on the CPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from kv_swap.engine import Direction
from kv_swap.host.transfers import CopyRun, copy_runs

from kv_offload.engines.vllm.locate import worker_of_process


class Copies:
    """Wraps the host engine's copies: holds or fails those of a direction."""

    def __init__(self) -> None:
        self._open = {direction: threading.Event() for direction in Direction}
        self._failing: dict[Direction, int] = {}
        self._copied: Counter[Direction] = Counter()
        self.release()

    def hold(self, direction: Direction) -> None:
        """Make copies of a direction wait before their first byte."""
        self._open[direction].clear()

    def fail(self, direction: Direction, every: int = 1) -> None:
        """Make one in `every` copies of a direction raise halfway through, the next one first."""
        self._failing[direction] = every
        self._copied[direction] = 0

    def release(self) -> None:
        """Let all copies pass."""
        self._failing.clear()
        for event in self._open.values():
            event.set()

    def copy_runs(self, runs: Sequence[CopyRun]) -> None:
        direction = self._direction(runs[0][0])
        assert self._open[direction].wait(120)
        self._copied[direction] += 1
        every = self._failing.get(direction)
        if every is not None and (self._copied[direction] - 1) % every == 0:
            copy_runs(runs[: (len(runs) + 1) // 2])
            raise OSError("injected fault")
        copy_runs(runs)

    def _direction(self, dst_address: int) -> Direction:
        arena = worker_of_process().transfer._state.arena
        inside = arena.address <= dst_address < arena.address + arena.nbytes
        return Direction.STORE if inside else Direction.LOAD
