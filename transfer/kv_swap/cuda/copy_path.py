"""The interface of a copy path: how the slices of one direction get onto a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch.cuda import Stream

PathName = Literal["kernel", "dma"]
PATHS: tuple[PathName, ...] = ("kernel", "dma")

Slice = NDArray[Any]
"""Part of a job, in the form that its path queues: pairs, or copies. Only the path looks inside."""

WaveRange = range
"""Waves that follow one another and are copied together."""


class CopyPath(ABC):
    """Queues the copies of one direction, between one layout and one arena.

    A lane cuts a job with `slices`, hands them to `queue` in order, and records an event behind
    each. It has at most `max_in_flight` slices queued whose event has not completed, and queues at
    most `slices_per_call` within one call of the engine. `call` names in errors what failed.
    """

    name: PathName
    call: str
    max_in_flight: int
    slices_per_call: int

    @abstractmethod
    def slices(self, pairs: NDArray[np.int32]) -> Iterator[Slice]:
        """Cut a job's pairs, `(n, 2)`, n >= 1, lazily; the iterator keeps `pairs`."""

    @abstractmethod
    def queue(self, part: Slice, stream: Stream) -> None:
        """Queue a slice; it has ended when what is queued on `stream` afterwards begins.

        It begins only after all that was queued on `stream` before. Neither blocks nor allocates
        on the device. Raises `RuntimeError` from CUDA; part of the slice may then be queued.
        """

    def set_waves(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """See `SwapEngine.set_waves`; `stream` is the one on which waves will be queued."""
        raise NotImplementedError(f"{self.name} does not copy in waves")

    def wave_slices(self, pairs: NDArray[np.int32]) -> Iterator[tuple[WaveRange, Slice]]:
        """Cut a job as `slices` does, once for every range of waves; the ranges are in order."""
        raise NotImplementedError(f"{self.name} does not copy in waves")

    def queue_waves(self, waves: WaveRange, part: Slice, stream: Stream) -> None:
        """Queue what `part` has in the regions of these waves; otherwise as `queue`."""
        raise NotImplementedError(f"{self.name} does not copy in waves")

    @abstractmethod
    def warm_up(self, stream: Stream) -> None:
        """Have CUDA load what `queue` needs, so that it does not do so within a step."""
