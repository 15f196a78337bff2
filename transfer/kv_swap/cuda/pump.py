"""A thread that queues what a step has no time for: the copies of long jobs.

A gated copy of 1 GiB is 256 calls of the driver, 0.5 to 0.8 ms of the host's time, and a stream's
queue holds 2 GiB. So `Lane.submit` queues the first slice of a job, and this thread the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_swap.cuda.device import allow_beside_captures, device_index, import_cupy

if TYPE_CHECKING:
    import torch

    from kv_swap.cuda.lane import Lane

logger = logging.getLogger(__name__)

TURN_SLICES = 4
"""Slices that a lane queues before the next lane has its turn."""

FULL_SECONDS = 0.001
"""Between two looks at a full queue, which holds 40 ms of copies unless these are small."""


class Pump:
    """Serves the lanes that were added to it, in turns, until `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._lanes: list[Lane] = []
        self._woken = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(
            target=_run,
            args=(self._serve, device_index(device)),
            name="kv-swap-pump",
            daemon=True,
        )

    def add(self, lane: Lane) -> None:
        """Serve a lane, too; before `start`."""
        self._lanes.append(lane)

    def start(self) -> None:
        """Start the thread, which waits until it is woken."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at its lanes."""
        self._woken.set()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on this thread, as a finalizer may: it cannot stop it."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Have the thread end, and wait for it: it queues nothing any more."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._lanes.clear()

    def _serve(self) -> None:
        from kv_swap.cuda.lane import Progress

        while not self._stopping:
            self._woken.clear()
            progress = [self._turn(lane) for lane in self._lanes]
            if Progress.MORE not in progress and not self._stopping:
                self._woken.wait(FULL_SECONDS if Progress.FULL in progress else None)

    def _turn(self, lane: Lane) -> Any:
        try:
            return lane.queue(TURN_SLICES)
        except Exception as error:  # the thread must serve other jobs
            logger.exception("an error of the thread that queues copies; its jobs fail")
            lane.fail_unqueued(RuntimeError(str(error)))
            return None


def _run(serve: Callable[[], None], index: int) -> None:
    """Serve on a device, whose captures of CUDA graphs on other threads are not ended by that."""
    import_cupy().cuda.Device(index).use()
    allow_beside_captures()
    serve()
