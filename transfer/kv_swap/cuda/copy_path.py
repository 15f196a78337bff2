"""The interface of a copy path: how the slices of one direction get onto a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch.cuda import Stream

WaveRange = range
"""Waves that follow one another and are copied together."""

Slice = tuple[WaveRange | None, Any]
"""Part of a job: its waves, `None` for whole slots, and its pairs or copies, as its path wants."""


class CopyPath(ABC):
    """Queues the copies of one direction, between one layout and one arena.

    A lane cuts a job with `slices`, hands them to `queue` in order, and records an event behind
    each. At most `max_in_flight` slices are in flight, and one call of the engine queues at most
    `slices_per_call`. `call` names in errors what failed.
    """

    call: str
    max_in_flight: int
    slices_per_call: int

    @abstractmethod
    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Cut a job's pairs, `(n, 2)`, n >= 1, lazily; the iterator keeps `pairs`.

        With `in_waves` once for every range of waves; the ranges are in order.
        """

    @abstractmethod
    def queue(self, part: Slice, stream: Stream) -> None:
        """Queue a slice on `stream`. Neither blocks nor allocates on the device.

        Raises `RuntimeError` from CUDA; part of the slice may then be queued.
        """

    def warm_up(self, stream: Stream) -> None:  # noqa: B027 - not every path needs it
        """Have CUDA load what `queue` needs, so that it does not do so within a step."""
