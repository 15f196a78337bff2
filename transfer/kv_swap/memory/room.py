"""How much memory a pool may take while it grows: as much as leaves others some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What is available on this host, and what of it stays free of pools.

    `read` returns the bytes that this process could take now, and where the figure is from. Several
    threads call it at a time. What it raises counts as a failure to lock memory.
    """

    read: Callable[[], tuple[int, str]]
    headroom_bytes: int

    def spare_bytes(self, nbytes: int) -> tuple[int, str]:
        """Return what is left above the headroom after taking `nbytes`, and the figures."""
        available_bytes, source = self.read()
        figures = (
            f"{available_bytes} bytes are available ({source}), {nbytes} are wanted next, and "
            f"{self.headroom_bytes} must stay free"
        )
        return available_bytes - nbytes - self.headroom_bytes, figures
