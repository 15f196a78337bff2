"""Self-test at startup: gates let small copies through on this machine.

While 64 MiB are copied in pieces with gates, several small copies run in a row on another stream; a
single one might take another path and never wait. The device measures all times, so a busy host can
only invalidate single turns. The test correctly fails if the process has only one connection for
copies (`CUDA_DEVICE_MAX_CONNECTIONS=1`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kv_swap.cuda.block_copies import Copies
from kv_swap.cuda.device import CudaRegistrar, device_index, import_cupy
from kv_swap.cuda.gated import PIECE_BYTES, Gates
from kv_swap.engine import Direction
from kv_swap.errors import DeviceError, PinnedMemoryError
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch

PIECES = 8
COPIES = 4
"""Number of copies in a piece."""

SMALL_COPIES, SMALL_BYTES = 3, 2048

MOST_PIECES = 3.0
"""The small copies must complete within the time of this many pieces."""

TURNS, MOST_TURNS = 3, 12
"""Number of valid turns needed, and maximum number of turns run to get them."""

TRIES = 3
"""Attempts at the whole test: other processes may be using the copy engine."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Device times of one turn in milliseconds, from the start of the first piece.

    The last piece ended at `ended`; the small copies ran from `small_began` to `small_ended`.
    `queued_early` is True if the host queued them before half of the pieces had ended.
    """

    ended: float
    small_began: float
    small_ended: float
    queued_early: bool

    @property
    def counts(self) -> bool:
        """True if the small copies were queued so early that without gates they would wait."""
        return self.small_began < self.ended * (1 - (MOST_PIECES + 1) / PIECES)

    @property
    def pieces_waited(self) -> float:
        """Time until the small copies completed, in units of one piece's time."""
        return (self.small_ended - self.small_began) / (self.ended / PIECES)


@dataclass(frozen=True, slots=True)
class GateReport:
    """The result: whether the copy engine yields at gates, and the evidence."""

    yields: bool
    found: str


def judge(turns: dict[Direction, Sequence[Turn]]) -> GateReport:
    """Judge each direction by the median of its valid turns."""
    waits = {}
    for direction, tried in turns.items():
        counting = [turn for turn in tried if turn.counts]
        if len(counting) < TURNS:
            return GateReport(yields=False, found=_too_few(direction, tried, len(counting)))
        waits[direction] = statistics.median(turn.pieces_waited for turn in counting)
    found = " and ".join(
        f"{SMALL_COPIES} small {direction.value}s took the time of {waited:.1f} pieces of "
        f"{PIECE_BYTES >> 20} MiB"
        for direction, waited in waits.items()
    )
    return GateReport(max(waits.values()) <= MOST_PIECES, f"{found}, at most {MOST_PIECES:g} pass")


def _too_few(direction: Direction, tried: Sequence[Turn], counting: int) -> str:
    held = sum(turn.queued_early and not turn.counts for turn in tried)
    if held >= TURNS:
        return (
            f"in {held} of {len(tried)} turns small {direction.value}s began only when most of the "
            f"long ones that were queued before them had ended: copies share a connection to the "
            f"device, which needs two or more (CUDA_DEVICE_MAX_CONNECTIONS)"
        )
    return (
        f"the host was too slow to test it: {counting} of {len(tried)} turns of "
        f"{direction.value}s count, {TURNS} are needed"
    )


@cache
def _test(index: int) -> GateReport:
    import torch

    try:
        bench = _Bench(torch.device("cuda", index))
        for _ in range(TRIES):
            report = judge({direction: bench.turns(direction) for direction in Direction})
            if report.yields:
                break
    except (DeviceError, PinnedMemoryError, RuntimeError) as error:
        return GateReport(yields=False, found=f"it could not be tested: {error}")
    return report


def check_gates(device: torch.device) -> GateReport:
    """Return whether a device's copy engine yields at gates; tested once per process.

    Blocks for tens of milliseconds; temporarily takes 8 MiB on the device and 8 MiB of page-locked
    memory.
    """
    return _test(device_index(device))


class _Bench:
    """Buffers and streams of the test."""

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = import_cupy().cuda
        self._gates = Gates(device)
        with cuda.Device(device_index(device)):
            self._memory = cuda.Memory(PIECE_BYTES + SMALL_COPIES * SMALL_BYTES)
        nbytes = PIECE_BYTES + SMALL_COPIES * SMALL_BYTES
        self._host = HostArena(1, nbytes, register=CudaRegistrar(device))
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]

    def turns(self, direction: Direction) -> list[Turn]:
        """Run turns until enough are valid or the maximum is reached; the first only warms up."""
        self._turn(direction)
        turns: list[Turn] = []
        while len(turns) < MOST_TURNS and sum(turn.counts for turn in turns) < TURNS:
            turns.append(self._turn(direction))
        return turns

    def _turn(self, direction: Direction) -> Turn:
        pieces = self._copies(direction, 0, PIECE_BYTES // COPIES, COPIES)
        small = self._copies(direction, PIECE_BYTES, SMALL_BYTES, SMALL_COPIES)
        began, half, ended, small_began, small_ended = self._events
        long_stream, small_stream = self._streams
        began.record(long_stream)
        for behind in (half, ended):
            self._gates.queue(pieces, [(0, COPIES)] * (PIECES // 2), long_stream.cuda_stream)
            behind.record(long_stream)
        small_began.record(small_stream)
        self._gates.copy(small, small_stream.cuda_stream)
        small_ended.record(small_stream)
        queued_early = not half.query()
        for stream in self._streams:
            stream.synchronize()
        ended_at, small_began_at, small_ended_at = (
            began.elapsed_time(event) for event in (ended, small_began, small_ended)
        )
        return Turn(ended_at, small_began_at, small_ended_at, queued_early)

    def _copies(self, direction: Direction, first: int, nbytes: int, count: int) -> Copies:
        offsets = first + nbytes * np.arange(count)
        device, host = self._memory.ptr + offsets, self._host.address + offsets
        to, of = (device, host) if direction is Direction.LOAD else (host, device)
        return Copies(to, of, np.full(count, nbytes))
