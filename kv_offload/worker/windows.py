"""Arenas of the host pool's other engines, which a rank's loads read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from kv_swap.memory.windows import Windows

from kv_offload.messages import WINDOW_BITS, LoadJob, Window

MAX_WINDOWS = 64
"""Engines of a pool can read only the arenas of seats below this number."""

MAX_SLOT = np.iinfo(np.int32).max
"""No transfer engine has a slot with this number."""


def count_windows(num_slots: int) -> int:
    """Return the number of windows for an arena in a host pool."""
    return MAX_WINDOWS if num_slots <= 1 << WINDOW_BITS else 0


class PeerArenas:
    """Maps the arenas that plans name, a window for each seat, and reports what loads can read."""

    def __init__(self, rank: int) -> None:
        self.windows: Windows | None = None
        """The windows of the transfer engine; None without a host pool."""
        self._rank = rank
        self._paths: dict[int, str] = {}
        self._reported: dict[int, tuple[str, int]] | None = {}
        """None if the next report must have all windows: the last one may have been lost."""

    def take(self, changes: Iterable[Window]) -> None:
        """Begin to map and to unmap arenas. Never blocks."""
        for change in changes:
            self._reported = None
            seat, path = change.seat, change.files.get(self._rank)
            windows = self.windows
            if windows is not None and seat >= len(windows):
                windows = None  # this seat has no window
            if path:
                self._paths[seat] = path
                if windows is not None:
                    windows.attach(seat, path, change.num_slots)
            else:
                self._paths.pop(seat, None)
                if windows is not None:
                    windows.detach(seat)

    def number(self, loads: Sequence[LoadJob]) -> Sequence[LoadJob]:
        """Return the loads with the transfer engine's numbers for slots of peers."""
        windows = self.windows
        if windows is None or not len(windows):
            return loads
        return [_number(job, windows.window_slots) for job in loads]

    def report(self) -> dict[int, tuple[str, int]] | None:
        """Return the `windows` of a report; None if they are the same as in the last one."""
        windows = self.windows
        if windows is None or not (self._paths or self._reported != {}):
            return None
        ready = windows.ready_slots
        found = {
            seat: (path, ready[seat] if seat < len(ready) else 0)
            for seat, path in self._paths.items()
        }
        if found == self._reported:
            return None
        self._reported = found
        return dict(found)


def _number(job: LoadJob, window_slots: int) -> LoadJob:
    windows = job.pairs[:, 1] >> WINDOW_BITS
    if not windows.any():
        return job
    pairs = job.pairs.copy()
    slots = pairs[:, 1] & ((1 << WINDOW_BITS) - 1)
    pairs[:, 1] = np.minimum(slots + windows.astype(np.int64) * window_slots, MAX_SLOT)
    return replace(job, pairs=pairs)
