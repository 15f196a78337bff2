"""Copy streams: what a copy waits for, and the events that tell when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.cuda import Event, Stream


class CopyStream:
    """A stream for the copies of one direction on `device`.

    Of default priority: priorities do not affect copies, and a copy must not displace compute.
    `num_events` events are made here and reused; recording one again does not disturb a wait that
    was queued on its earlier recording. More are made only while more are out.
    """

    def __init__(
        self, device: torch.device, num_events: int, output_copy_stream: Stream | None = None
    ) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._output_copy_stream = output_copy_stream
        self.stream: Stream = torch.cuda.Stream(device)
        self._events: list[Event] = [
            torch.cuda.Event(enable_timing=True) for _ in range(num_events)
        ]
        for event in self._events:
            # torch allocates a CUDA event when it is first recorded.
            event.record(self.stream)

    def wait_for_compute(self) -> Event:
        """Make copies queued from now on wait for all that is queued on the compute stream now.

        That is the stream current on the calling thread, asked for every time: it may be another
        one in the next step. The output-copy stream is waited for too, where there is one: a store
        then never delays the sampled tokens on their way to the host.

        Returns the event on the compute stream; give it back with `recycle`.
        """
        event = self._take()
        event.record(self._cuda.current_stream(self._device))
        self.stream.wait_event(event)
        if self._output_copy_stream is not None:
            self.stream.wait_stream(self._output_copy_stream)
        return event

    def record(self) -> Event:
        """Return an event that completes with all copies queued so far."""
        event = self._take()
        event.record(self.stream)
        return event

    def recycle(self, *events: Event) -> None:
        """Take events back; the caller must not use them any more."""
        self._events.extend(events)

    def _take(self) -> Event:
        return self._events.pop() if self._events else self._cuda.Event(enable_timing=True)
