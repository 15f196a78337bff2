"""The lane over a path that copies nothing: events complete when the test says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.lane import CopyPath, Lane
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError

SLOT_BYTES = 4 << 20


class FakeEvent:
    def __init__(self) -> None:
        self.completed = False
        self.error: RuntimeError | None = None
        self.followers: list[FakeEvent] = []

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.completed

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.completed
        return 1500.0


class FakePath(CopyPath):
    """Slices of four pairs; `copied` are those that have ended."""

    call = "launching swap_store"

    def __init__(self, max_in_flight: int, slices_per_call: int) -> None:
        self.max_in_flight = max_in_flight
        self.slices_per_call = slices_per_call
        self.queued: list[tuple[list[list[int]], FakeEvent | None]] = []
        self.copied: list[list[list[int]]] = []
        self.failing: int | None = None
        self.calls = 0
        self.waves: list[int] = []

    def slices(self, pairs: Any, *, in_waves: bool) -> Iterator[Any]:
        for waves in (range(1), range(1, 3), range(3, 4)) if in_waves else (None,):
            for first in range(0, len(pairs), 4):
                yield waves, pairs[first : first + 4]

    def queue(self, part: Any, stream: Any) -> None:
        assert stream is STREAM
        waves, pairs = part
        if waves is not None:
            self.waves.append(waves.start)
        self.calls += 1
        if self.calls - 1 == self.failing:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self.queued.append((pairs.tolist(), None))


STREAM = object()


class FakeDevice:
    """Stands in for `CopyStream`, and ends slices of `path`."""

    stream = STREAM

    def __init__(self, max_in_flight: int, slices_per_call: int) -> None:
        self.path = FakePath(max_in_flight, slices_per_call)
        self.out: set[FakeEvent] = set()
        self.failing_wait = False
        self.failing_record = False
        self.failing_make = False
        self.waits = 0
        self.compute = 1
        self.failing_await = False
        self.awaited: list[tuple[int, FakeEvent]] = []

    @property
    def queued(self) -> int:
        return len(self.path.queued)

    def take(self) -> FakeEvent:
        if self.failing_make:
            raise RuntimeError("CUDA error: out of memory")
        event = FakeEvent()
        self.out.add(event)
        return event

    def record(self, event: FakeEvent | None = None) -> FakeEvent:
        if self.failing_record:
            raise RuntimeError("CUDA error: unspecified launch failure")
        event = event or self.take()
        part, before = self.path.queued[-1]
        if before is None:
            self.path.queued[-1] = (part, event)
        else:  # behind a slice that failed there is nothing new to wait for
            event.completed = before.completed
            before.followers.append(event)
        return event

    def wait_stream(self) -> FakeEvent:
        if self.failing_wait:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.waits += 1
        event = FakeEvent()
        self.out.add(event)
        return event

    def compute_stream(self) -> int:
        return self.compute

    def make_compute_wait(self, stream: int, event: FakeEvent) -> None:
        if self.failing_await:
            raise RuntimeError("CUDA error: invalid resource handle")
        self.awaited.append((stream, event))

    def recycle(self, *events: FakeEvent) -> None:
        self.out.difference_update(events)

    def complete(self, count: int) -> None:
        """End the next `count` slices."""
        for part, event in self.path.queued[len(self.path.copied) :][:count]:
            self.path.copied.append(part)
            assert event is not None
            for ended in (event, *event.followers):
                ended.completed = True


def make_lane(max_in_flight: int = 4, slices_per_call: int = 4) -> tuple[FakeDevice, Lane]:
    device = FakeDevice(max_in_flight, slices_per_call)
    return device, Lane(Direction.STORE, device.path, device)  # type: ignore[arg-type]


def submit(lane: Lane, job_id: int, count: int, *, in_waves: bool = False) -> list[list[int]]:
    """Submit a store, or a load in waves; return its pairs."""
    pairs = np.stack([np.arange(count), 1000 * job_id + np.arange(count)], 1).astype(np.int32)
    expected = pairs.tolist()
    direction = Direction.LOAD if in_waves else Direction.STORE
    lane.submit(SwapJob(job_id, direction, pairs, in_waves, in_waves), count * SLOT_BYTES)
    pairs[:] = -1  # the caller may reuse them
    return expected


def ids(completions: Sequence[Completion]) -> list[int]:
    return [completion.job_id for completion in completions]


def test_jobs_are_cut_and_end_with_their_last_slice() -> None:
    device, store = make_lane()
    expected = submit(store, 1, 10)
    assert device.queued == 3
    device.complete(2)
    assert store.advance() == []
    assert not store.idle
    device.complete(1)
    (completion,) = store.advance()
    assert completion == Completion(1, Direction.STORE, 10 * SLOT_BYTES, 1.5)
    assert device.path.copied == [expected[:4], expected[4:8], expected[8:]]
    assert store.idle
    assert store.advance() == []
    assert not device.out


def test_no_more_slices_are_in_flight_than_the_path_allows() -> None:
    device, store = make_lane()
    expected = [submit(store, 1, 20), submit(store, 2, 12), submit(store, 3, 1)]
    assert device.queued == 4
    ended = []
    for step in (0, 1, 3, 2, 1, 4, 4):
        device.complete(step)
        ended += ids(store.advance())
        assert device.queued - len(device.path.copied) <= 4
    assert ended == [1, 2, 3]
    assert list(chain(*device.path.copied)) == list(chain(*expected))
    assert device.waits == 3
    assert not device.out


def test_a_failed_slice_fails_its_job_alone_and_only_when_its_slices_have_ended() -> None:
    device, store = make_lane()
    device.path.failing = 1
    submit(store, 7, 12)
    expected = submit(store, 8, 1)
    assert device.queued == 2
    assert store.advance() == []
    device.complete(1)
    (failed,) = store.advance()
    assert failed.job_id == 7
    assert isinstance(failed.error, CopyError)
    for part in ("swap_store", "CUDA_ERROR_INVALID_VALUE", "job 7", f"{12 * SLOT_BYTES} bytes"):
        assert part in str(failed.error)
    assert failed.seconds > 0
    device.complete(1)
    (fine,) = store.advance()
    assert (fine.job_id, fine.error) == (8, None)
    assert device.path.copied[1] == expected


@pytest.mark.parametrize(
    ("fault", "queued", "message"),
    [
        ("failing_wait", 0, "waiting for the compute stream failed with .* illegal memory access"),
        ("failing_record", 1, "recording an event failed with CUDA error: unspecified"),
    ],
)
def test_a_job_that_cannot_be_ordered_or_followed_by_an_event_fails(
    fault: str, queued: int, message: str
) -> None:
    device, store = make_lane()
    setattr(device, fault, True)
    submit(store, 7, 1)
    assert device.queued == queued
    (failed,) = store.advance()
    assert re.search(message, str(failed.error))
    assert store.idle


def test_a_lost_context_fails_every_job() -> None:
    device, store = make_lane()
    submit(store, 1, 20)
    submit(store, 2, 1)
    event = device.path.queued[0][1]
    assert event is not None
    event.error = RuntimeError("CUDA error: unspecified launch failure")
    completions = store.advance()
    assert ids(completions) == [1, 2]
    for completion in completions:
        assert "unspecified launch failure" in str(completion.error)
        assert "the CUDA context is lost" in str(completion.error)
    assert device.queued == 4
    assert store.idle


def test_a_slice_for_which_there_is_no_event_is_not_queued() -> None:
    """It would run on after its job has ended, and write blocks that are another's by then."""
    device, store = make_lane()
    device.path.max_in_flight = 1
    submit(store, 7, 8)
    device.failing_make = True
    device.complete(1)
    (failed,) = store.advance()
    assert device.queued == 1
    assert "making an event failed with CUDA error: out of memory" in str(failed.error)
    assert store.idle


def test_a_call_queues_no_more_than_the_path_allows() -> None:
    device, store = make_lane(slices_per_call=1)
    submit(store, 1, 8)
    submit(store, 2, 4)
    assert device.queued == 2
    device.complete(2)
    assert ids(store.advance()) == [1]
    assert device.queued == 3


def test_compute_waits_for_the_last_slice_of_what_is_in_flight() -> None:
    device, lane = make_lane(max_in_flight=3)
    lane.await_all()
    assert device.awaited == []
    submit(lane, 1, 8)
    lane.await_all()
    assert device.awaited == [(1, events(device)[1])]
    submit(lane, 2, 8)  # of which one slice fits
    lane.fail_unqueued()
    with pytest.raises(CopyError, match="3 slices are in flight, no more fit"):
        lane.await_all()
    assert device.awaited[1:] == [(1, events(device)[2])]
    device.complete(3)
    fine, failed = lane.advance()
    assert (fine.job_id, fine.error) == (1, None)
    assert "3 slices are in flight, no more fit" in str(failed.error)


# -- waves -------------------------------------------------------------------------------------


def events(device: FakeDevice) -> list[FakeEvent]:
    return [event for _, event in device.path.queued if event is not None]


def test_compute_waits_for_the_last_slice_of_a_wave_once() -> None:
    device, lane = make_lane(8, 8)
    submit(lane, 1, 8, in_waves=True)
    assert device.path.waves == [0, 0, 1, 1, 3, 3]
    behind = events(device)
    for wave in (0, 2, 0, 1, 2):
        lane.await_wave(wave)
    assert device.awaited == [(1, behind[1]), (1, behind[3])]
    device.compute = 2
    lane.await_wave(0)
    assert device.awaited[2:] == [(2, behind[1])], "another stream has waited for nothing yet"
    device.compute = 1
    lane.await_wave(9)
    assert device.awaited[3:] == [(1, behind[5])]
    device.complete(6)
    (completion,) = lane.advance()
    assert (completion.error, completion.nbytes) == (None, 8 * SLOT_BYTES)
    assert not device.out


def test_a_new_load_is_waited_for_anew() -> None:
    device, lane = make_lane(8, 8)
    submit(lane, 1, 4, in_waves=True)
    lane.await_wave(3)
    submit(lane, 2, 4, in_waves=True)
    lane.await_wave(0)
    assert device.awaited == [(1, events(device)[2]), (1, events(device)[3])]
    submit(lane, 3, 4)  # in one piece, and not waited for
    lane.await_wave(3)
    assert len(device.awaited) == 2


@pytest.mark.parametrize("fault", ["launch", "wait"])
def test_compute_cannot_go_on_with_a_wave_that_failed(fault: str) -> None:
    device, lane = make_lane(8, 8)
    device.path.failing = 1 if fault == "launch" else None
    submit(lane, 1, 4, in_waves=True)
    device.failing_await = fault == "wait"
    for wave in (0, 3):
        with pytest.raises(CopyError, match="store job 1"):
            lane.await_wave(wave)
    assert device.awaited == []
    device.complete(3)
    (failed,) = lane.advance()
    assert failed.error is not None
