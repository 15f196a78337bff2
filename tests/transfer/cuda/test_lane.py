"""Lanes and their streams on a played device, over a path that notes what was copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from kv_swap.cuda import lane as lane_module  # noqa: E402
from kv_swap.cuda.lane import CopyPath, Lane, Pace  # noqa: E402
from kv_swap.cuda.streams import CopyStream  # noqa: E402
from kv_swap.engine import Completion, Direction, SwapJob  # noqa: E402
from kv_swap.errors import CopyError  # noqa: E402

from tests.support.played_cuda import COMPUTE, PlayedCuda, Stream  # noqa: E402

SLOT_BYTES = 4 << 20


class Path(CopyPath):
    """Slices of four pairs, in three waves or none; `copied` are those that have ended."""

    call = "launching swap_store"

    def __init__(self, cuda: PlayedCuda, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.queued = 0
        self.copied: list[list[list[int]]] = []
        self.failing: int | None = None
        self.failure: Exception = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self.behind: Callable[[], object] = lambda: None
        """Called when a slice was queued."""
        self._cuda = cuda

    def slices(self, pairs: Any, *, in_waves: bool) -> Iterator[Any]:
        for wave in range(3) if in_waves else (None,):
            for first in range(0, len(pairs), 4):
                yield wave, pairs[first : first + 4]

    def queue(self, part: Any, stream: Any) -> None:
        self.queued += 1
        if self.queued == self.failing:
            raise self.failure
        self._cuda.calls.append(("launch", 0))
        pairs = part[1].tolist()
        self._cuda.queue(lambda: self.copied.append(pairs), stream.cuda_stream)
        self.behind()


class Bed:
    """A lane on a played device; a test says how many slices have ended."""

    def __init__(self, cuda: PlayedCuda, max_in_flight: int = 4) -> None:
        self.cuda = cuda
        self.path = Path(cuda, max_in_flight)
        stream = CopyStream(torch.device("cuda", 0), 2 * max_in_flight)
        self.lane = Lane(Direction.STORE, self.path, stream, Pace())
        self.read: list[int] = []
        """How many slices had ended when compute came to each `look`."""
        cuda.run()

    def submit(self, job_id: int, count: int, *, in_waves: bool = False) -> list[list[int]]:
        """Submit a store, or a load in waves; return its pairs."""
        pairs = np.stack([np.arange(count), 1000 * job_id + np.arange(count)], 1).astype(np.int32)
        expected: list[list[int]] = pairs.tolist()
        direction = Direction.LOAD if in_waves else Direction.STORE
        self.lane.submit(SwapJob(job_id, direction, pairs, in_waves, in_waves), count * SLOT_BYTES)
        pairs[:] = -1  # the caller may reuse them
        self.cuda.run(COMPUTE)
        return expected

    def look(self) -> None:
        self.cuda.queue(lambda: self.read.append(len(self.path.copied)))

    def complete(self, count: int) -> None:
        """End the next `count` slices; compute goes on as far as it may."""
        end = len(self.path.copied) + count
        while len(self.path.copied) < end:
            self.cuda.step_copies()
        self.cuda.step_copies()  # the event behind it
        self.cuda.run(COMPUTE)

    def ended(self) -> list[int]:
        return [completion.job_id for completion in self.lane.advance()]


def test_no_more_slices_are_in_flight_than_the_path_allows(cuda):
    """Jobs end in order, and no event is made but those that the stream began with."""
    bed = Bed(cuda)
    made = len(cuda.recorded)
    counts = (20, 10, 1)
    expected = [bed.submit(job_id, count) for job_id, count in enumerate(counts)]
    assert bed.path.queued == 4
    ended = []
    for step in (0, 1, 3, 2, 1, 2):
        bed.complete(step)
        ended += bed.lane.advance()
        assert bed.path.queued - len(bed.path.copied) <= 4
    assert ended == [
        Completion(job_id, Direction.STORE, count * SLOT_BYTES, 0.001)
        for job_id, count in enumerate(counts)
    ]
    assert list(chain(*bed.path.copied)) == list(chain(*expected))
    assert bed.lane.idle
    for job_id in range(4, 12):
        bed.submit(job_id, 1)
        bed.complete(1)
        assert bed.ended() == [job_id]
    assert len(cuda.recorded) == made


def test_a_job_waits_for_its_own_compute_not_for_that_of_a_later_one(cuda):
    """What is yet to be queued of a job does not wait for the steps of jobs behind it."""
    bed = Bed(cuda, max_in_flight=1)
    first = bed.submit(1, 8)
    written: list[int] = []
    cuda.queue(lambda: written.append(1))
    pairs = np.array([[3, 5]], np.int32)
    bed.lane.submit(SwapJob(2, Direction.STORE, pairs), 1)
    for _ in range(2):
        cuda.run_copies()
        assert bed.ended() == [1][: len(bed.path.copied) - 1]
    assert bed.path.copied == [first[:4], first[4:]]
    cuda.run()
    assert bed.path.copied[2:] == [[[3, 5]]]
    assert written == [1]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bed], list[float]]:
    """Have a slice of a bed end whenever its host waits; gives the list of waits."""

    def watch(bed: Bed) -> list[float]:
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            bed.complete(1)

        monkeypatch.setattr(lane_module.time, "sleep", sleep)
        return waits

    return watch


def test_compute_waits_for_slices_that_do_not_fit_yet(cuda, slept):
    """The host waits, until as many have ended as make room for the last."""
    bed = Bed(cuda, max_in_flight=2)
    waits = slept(bed)
    bed.submit(1, 20)
    bed.lane.await_all()
    bed.look()
    assert len(waits) == 3
    cuda.run(COMPUTE)
    assert bed.read == []
    bed.complete(2)
    assert bed.read == [5]


def test_a_wave_waits_for_room_and_later_waves_do_not(cuda, slept):
    bed = Bed(cuda, max_in_flight=2)
    waits = slept(bed)
    bed.submit(1, 4, in_waves=True)  # three slices
    for wave, sleeps in ((0, 0), (1, 0), (2, 1)):
        bed.lane.await_wave(wave)
        assert len(waits) == sleeps


@pytest.mark.parametrize(
    ("failing", "room_seconds", "message"),
    [
        ({"eventQuery"}, 60.0, "the CUDA context is lost"),
        (set[str](), 0.0, "2 slices have not ended for 0 s: store job 1"),
    ],
)
def test_compute_does_not_wait_for_ever(cuda, monkeypatch, failing, room_seconds, message):
    monkeypatch.setattr(lane_module, "_ROOM_SECONDS", room_seconds)
    bed = Bed(cuda, max_in_flight=2)
    bed.submit(1, 20)
    cuda.failing = failing
    with pytest.raises(CopyError, match=message):
        bed.lane.await_all()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_failed_slice_fails_its_job_alone_and_only_when_its_slices_have_ended(cuda, kind):
    bed = Bed(cuda)
    bed.path.failing, bed.path.failure = 2, kind("CUDA_ERROR_INVALID_VALUE")
    bed.submit(7, 12)
    expected = bed.submit(8, 1)
    assert bed.path.queued == 3
    assert bed.lane.advance() == []
    bed.complete(1)
    cuda.step_copies()  # the event behind the slice that failed, a part of which may run
    (failed,) = bed.lane.advance()
    assert failed.job_id == 7
    assert isinstance(failed.error, CopyError)
    for part in ("swap_store", "CUDA_ERROR_INVALID_VALUE", "job 7", f"{12 * SLOT_BYTES} bytes"):
        assert part in str(failed.error)
    assert failed.seconds > 0
    bed.complete(1)
    (fine,) = bed.lane.advance()
    assert (fine.job_id, fine.error) == (8, None)
    assert bed.path.copied[1] == expected


@pytest.mark.parametrize(
    ("call", "queued", "message"),
    [
        ("streamWaitEvent", 0, "waiting for the compute stream failed with streamWaitEvent: inj"),
        ("eventRecord", 1, "recording an event failed with eventRecord: injected"),
    ],
)
def test_a_job_that_cannot_be_ordered_or_followed_by_an_event_fails(cuda, call, queued, message):
    bed = Bed(cuda)
    if queued:
        bed.path.behind = lambda: cuda.failing.add(call)
    else:
        cuda.failing = {call}
    bed.submit(7, 1)
    assert bed.path.queued == queued
    (failed,) = bed.lane.advance()
    assert message in str(failed.error)
    assert bed.lane.idle


def test_a_job_whose_place_after_compute_is_not_known_is_not_copied(cuda, monkeypatch):
    bed = Bed(cuda)
    with monkeypatch.context() as patch:
        patch.setattr(bed.lane.stream, "mark", mock.Mock(side_effect=RuntimeError("no event")))
        bed.submit(1, 4)
    expected = bed.submit(2, 4)
    cuda.run()
    failed, fine = bed.lane.advance()
    assert "waiting for the compute stream failed with no event" in str(failed.error)
    assert fine.error is None
    assert bed.path.copied == [expected]


def test_a_lost_context_fails_every_job(cuda):
    bed = Bed(cuda)
    bed.submit(1, 20)
    bed.submit(2, 1)
    cuda.failing = {"eventQuery"}
    completions = bed.lane.advance()
    assert [completion.job_id for completion in completions] == [1, 2]
    for completion in completions:
        assert "eventQuery: injected fault" in str(completion.error)
        assert "the CUDA context is lost" in str(completion.error)
    assert bed.path.queued == 4
    assert bed.lane.idle


def test_a_slice_for_which_there_is_no_event_is_not_queued(cuda, monkeypatch):
    """It would run on after its job has ended, and write blocks that are another's by then."""
    bed = Bed(cuda, max_in_flight=1)
    bed.submit(7, 8)
    refusing = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(bed.lane.stream, "take", refusing)
    bed.complete(1)
    (failed,) = bed.lane.advance()
    assert bed.path.queued == 1
    assert "making an event failed with CUDA error: out of memory" in str(failed.error)
    assert bed.lane.idle


def test_compute_waits_for_the_last_slice_of_what_is_in_flight(cuda):
    bed = Bed(cuda)
    bed.lane.await_all()
    assert not cuda.queues[COMPUTE]
    bed.submit(1, 8)
    bed.lane.await_all()
    bed.look()
    bed.complete(1)
    assert bed.read == []
    bed.complete(1)
    assert bed.read == [2]


# -- waves -------------------------------------------------------------------------------------


def test_compute_waits_for_the_last_slice_of_a_wave_once(cuda, monkeypatch):
    bed, other = Bed(cuda, 8), Stream(cuda)
    bed.submit(1, 8, in_waves=True)
    cuda.calls.clear()
    for wave in (0, 1, 0, 1):
        bed.lane.await_wave(wave)
        bed.look()
    assert [call for call, _ in cuda.calls] == ["streamWaitEvent"] * 2
    with monkeypatch.context() as patch:
        patch.setattr(bed.lane.stream, "compute_stream", lambda: other.cuda_stream)
        bed.lane.await_wave(0)
    assert len(cuda.queues[other.cuda_stream]) == 1, "it has waited for nothing yet"
    bed.lane.await_wave(2)
    bed.look()
    for _ in range(6):
        bed.complete(1)
    assert bed.read == [2, 4, 4, 4, 6]
    (completion,) = bed.lane.advance()
    assert (completion.error, completion.nbytes) == (None, 8 * SLOT_BYTES)


def test_a_new_load_is_waited_for_anew(cuda):
    bed = Bed(cuda, 8)
    bed.submit(1, 4, in_waves=True)
    bed.lane.await_wave(2)
    bed.look()
    bed.submit(2, 4, in_waves=True)
    bed.lane.await_wave(0)
    bed.look()
    bed.submit(3, 4)  # in one piece, and not waited for
    bed.lane.await_wave(2)
    bed.look()
    for _ in range(5):
        bed.complete(1)
    assert bed.read == [3, 4, 4]


@pytest.mark.parametrize("fault", ["launch", "wait"])
def test_compute_cannot_go_on_with_a_wave_that_failed(cuda, fault):
    bed = Bed(cuda, 8)
    bed.path.failing = 2 if fault == "launch" else None
    bed.submit(1, 4, in_waves=True)
    cuda.failing = {"streamWaitEvent"} if fault == "wait" else set()
    for wave in (0, 2):
        with pytest.raises(CopyError, match="store job 1"):
            bed.lane.await_wave(wave)
    assert not cuda.queues[COMPUTE]
    cuda.run()
    (failed,) = bed.lane.advance()
    assert failed.error is not None


# -- streams -----------------------------------------------------------------------------------


def test_what_a_job_asks_of_cuda(cuda):
    """Nothing but the two calls that order it stands before its launch."""
    bed = Bed(cuda)
    cuda.calls.clear()
    bed.submit(1, 1)
    calls = [call for call, _ in cuda.calls]
    assert calls == ["eventRecord", "streamWaitEvent", "launch", "eventRecord"]


def test_default_streams_are_those_of_the_device_of_the_copies(cuda):
    output: Any = Stream(cuda)
    stream = CopyStream(torch.device("cuda", 1), 3, output)
    cuda.calls.clear()
    first, second = stream.mark()
    stream.make_compute_wait(COMPUTE, first)
    assert {device for _, device in cuda.calls} == {1}
    assert len(cuda.calls) == 3
    assert first is not second
    assert cuda.device == 0
    assert stream.take() is not stream.take()
