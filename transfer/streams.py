"""Copy streams: what a copy waits for, and the events that tell when it has ended."""

from __future__ import annotations

from collections.abc import Generator
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


class StreamTurns:
    """A second stream beside a copy stream, and turns on the two of them.

    Work that takes turns runs in the order in which it was queued, yet each stream has at most one
    piece of it that could run: a copy engine gets to the streams of others in between.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._other: Stream = torch.cuda.Stream(device)
        # One is enough: a wait is for the recording that was the latest when it was queued.
        self._event: Event = torch.cuda.Event()
        self._event.record(self._other)

    def take(self, own: Stream) -> Generator[Stream, None, None]:
        """Yield streams for one piece after the other; each waits for the piece before.

        `own` comes first. When the generator is closed `own` waits for all pieces, also if one of
        them could not be queued. Raises `RuntimeError` from CUDA.
        """
        current, following = own, self._other
        try:
            while True:
                yield current
                self._make_wait(following, current)
                current, following = following, current
        finally:
            if current is not own:
                self._make_wait(own, current)

    def _make_wait(self, waiting: Stream, awaited: Stream) -> None:
        self._event.record(awaited)
        waiting.wait_event(self._event)
