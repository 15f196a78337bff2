"""Copy streams, with the events that a copy waits for and those that show its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kv_swap.cuda.device import OnDevice, import_cupy

if TYPE_CHECKING:
    import torch
    from torch.cuda import Event, Stream


class CopyStream:
    """A stream for the copies of one direction on `device`.

    `num_events` events are created here and reused; recording one again does not affect a wait that
    was queued earlier. More are created only while more are in use.

    A copy begins only after these calls, so they take the shortest path: plain handles, through
    CuPy. Events are queried through torch, because CuPy's query of an incomplete event leaves an
    error behind that torch might raise.
    """

    def __init__(
        self, device: torch.device, num_events: int, output_copy_stream: Stream | None = None
    ) -> None:
        import torch

        runtime: Any = import_cupy().cuda.runtime
        # A stream's handle 0 is the default stream of the current device.
        self._on_device = OnDevice(device)
        self._record: Any = runtime.eventRecord
        self._wait_event: Any = runtime.streamWaitEvent
        self._current_stream: Any = torch._C._cuda_getCurrentRawStream
        self._make_event: Any = torch.cuda.Event
        self._output_copy_stream = output_copy_stream
        others = {self.compute_stream()}
        if output_copy_stream is not None:
            others.add(output_copy_stream.cuda_stream)
        # torch hands out its 32 streams in rotation, and the inference engine may use them too.
        self.stream: Stream = torch.cuda.Stream(device)
        while self.stream.cuda_stream in others:
            self.stream = torch.cuda.Stream(device)
        self._handle: int = self.stream.cuda_stream
        self._events = [self._new_event() for _ in range(num_events)]

    def compute_stream(self) -> int:
        """Return the handle of the current stream, which can change with every step."""
        handle: int = self._current_stream(self._on_device.index)
        return handle

    def mark_compute(self) -> Event:
        """Return an event that completes after all work queued on the compute stream so far."""
        return self._mark(self.compute_stream())

    def mark(self) -> list[Event]:
        """Return events for all work queued so far, the compute stream's first.

        The second is the output-copy stream's, if there is one: waiting for it keeps a store from
        delaying its step's tokens.
        """
        marks = [self.mark_compute()]
        if self._output_copy_stream is not None:
            marks.append(self._mark(self._output_copy_stream.cuda_stream))
        return marks

    def _mark(self, stream: int) -> Event:
        event = self.take()
        self._on_device(self._record, event.cuda_event, stream)
        return event

    def wait_stream(self, marks: Sequence[Event]) -> None:
        """Make work queued later on this stream wait for these events of other streams."""
        for event in marks:
            self._wait_event(self._handle, event.cuda_event)

    def make_compute_wait(self, stream: int, event: Event) -> None:
        """Make work queued later on `stream`, a compute stream, wait for `event`."""
        self._on_device(self._wait_event, stream, event.cuda_event)

    def record(self, event: Event | None = None) -> Event:
        """Return an event that completes after all copies queued so far.

        Records `event` if given, which must be from `take`; then it fails only if the CUDA context
        is lost.
        """
        event = self.take() if event is None else event
        self._record(event.cuda_event, self._handle)
        return event

    def take(self) -> Event:
        """Return an unused event, to be returned with `recycle`. Fails if CUDA is out of memory."""
        return self._events.pop() if self._events else self._new_event()

    def recycle(self, *events: Event) -> None:
        """Take events back. The caller must not use them afterwards."""
        self._events.extend(events)

    def _new_event(self) -> Event:
        event: Event = self._make_event(enable_timing=True)
        # torch creates the CUDA event when it is first recorded.
        event.record(self.stream)
        return event
