"""The lane without a device: events complete when the test says so, and lists are read then."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest

from transfer import lane
from transfer.engine import Completion, Direction, SwapJob
from transfer.errors import CopyError
from transfer.lane import Lane
from transfer.swap import LIST_BYTES, MAX_PAIRS

SLOT_BYTES = 4 << 20


class FakeEvent:
    def __init__(self) -> None:
        self.completed = False
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.completed

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.completed
        return 1500.0


class FakeDevice:
    """Stands in for `SwapKernel` and `CopyStream`; a launch reads its list when it is completed."""

    def __init__(self) -> None:
        self.stream = object()
        self.launched: list[tuple[int, FakeEvent | None]] = []
        self.copied: list[list[list[int]]] = []
        self.out: set[FakeEvent] = set()
        self.failing_launch: int | None = None
        self.failing_wait = False
        self.waits = 0

    def launch(self, direction: Direction, list_address: int, stream: object) -> None:
        assert stream is self.stream
        if len(self.launched) == self.failing_launch:
            self.failing_launch = None
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self.launched.append((list_address, None))

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self.launched[-1] = (self.launched[-1][0], event)
        self.out.add(event)
        return event

    def wait_for_compute(self) -> FakeEvent:
        if self.failing_wait:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.waits += 1
        event = FakeEvent()
        self.out.add(event)
        return event

    def recycle(self, *events: FakeEvent) -> None:
        self.out.difference_update(events)

    def complete(self, count: int) -> None:
        """End the next `count` launches."""
        for address, event in self.launched[len(self.copied) :][:count]:
            words = np.frombuffer(ctypes.string_at(address, LIST_BYTES), np.int32)
            self.copied.append(words[4 : 4 + 2 * words[0]].reshape(-1, 2).tolist())
            assert event is not None
            event.completed = True


class NoRegistrar:
    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(lane, "RING_ENTRIES", 4)
    monkeypatch.setattr(lane, "SLICE_BYTES", 16 << 20)
    return FakeDevice()


def make_lane(device: FakeDevice, slot_bytes: int = SLOT_BYTES) -> Lane:
    return Lane(
        Direction.STORE,
        device,  # type: ignore[arg-type]
        device,  # type: ignore[arg-type]
        slot_bytes,
        NoRegistrar(),
    )


def submit(store: Lane, job_id: int, count: int) -> list[list[int]]:
    pairs = np.stack([np.arange(count), 1000 * job_id + np.arange(count)], 1).astype(np.int32)
    expected = pairs.tolist()
    store.submit(SwapJob(job_id, Direction.STORE, pairs), count * SLOT_BYTES)
    pairs[:] = -1  # the caller may reuse them
    return expected


def ids(completions: Sequence[Completion]) -> list[int]:
    return [completion.job_id for completion in completions]


def test_jobs_are_cut_and_end_with_their_last_slice(device: FakeDevice) -> None:
    store = make_lane(device)
    expected = submit(store, 1, 10)
    assert len(device.launched) == 3
    device.complete(2)
    assert store.advance() == []
    assert not store.idle
    device.complete(1)
    (completion,) = store.advance()
    assert completion == Completion(1, Direction.STORE, 10 * SLOT_BYTES, 1.5)
    assert device.copied == [expected[:4], expected[4:8], expected[8:]]
    assert store.idle
    assert store.advance() == []
    assert not device.out


@pytest.mark.parametrize(
    ("slot_bytes", "pairs"), [(16, MAX_PAIRS), (1 << 30, 1), (8 << 20, 2), (5 << 20, 3)]
)
def test_slices_are_bounded_in_pairs_and_bytes(
    device: FakeDevice, slot_bytes: int, pairs: int
) -> None:
    store = make_lane(device, slot_bytes)
    submit(store, 1, pairs + 1)
    device.complete(2)
    assert [len(copied) for copied in device.copied] == [pairs, 1]


def test_a_full_ring_queues_and_never_overwrites_a_list(device: FakeDevice) -> None:
    store = make_lane(device)
    expected = [submit(store, 1, 20), submit(store, 2, 12), submit(store, 3, 1)]
    assert len(device.launched) == 4
    ended = []
    for step in (0, 1, 3, 2, 1, 4, 4):
        device.complete(step)
        ended += ids(store.advance())
        assert len(device.launched) - len(device.copied) <= 4
    assert ended == [1, 2, 3]
    assert list(chain(*device.copied)) == list(chain(*expected))
    assert device.waits == 3
    assert not device.out


def test_a_failed_launch_fails_its_job_alone_and_only_when_its_slices_have_ended(
    device: FakeDevice,
) -> None:
    store = make_lane(device)
    device.failing_launch = 1
    submit(store, 7, 12)
    expected = submit(store, 8, 1)
    assert len(device.launched) == 2
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
    assert device.copied[1] == expected


def test_a_job_that_cannot_be_ordered_is_not_launched(device: FakeDevice) -> None:
    store = make_lane(device)
    device.failing_wait = True
    submit(store, 3, 1)
    assert not device.launched
    (completion,) = store.advance()
    assert "waiting for the compute stream failed" in str(completion.error)
    assert "illegal memory access" in str(completion.error)
    assert store.idle


def test_a_lost_context_fails_every_job(device: FakeDevice) -> None:
    store = make_lane(device)
    submit(store, 1, 20)
    submit(store, 2, 1)
    event = device.launched[0][1]
    assert event is not None
    event.error = RuntimeError("CUDA error: unspecified launch failure")
    completions = store.advance()
    assert ids(completions) == [1, 2]
    for completion in completions:
        assert "unspecified launch failure" in str(completion.error)
    assert len(device.launched) == 4
    assert store.idle


def test_warm_up_launches_an_empty_list(device: FakeDevice) -> None:
    store = make_lane(device)
    store.warm_up()
    device.record()
    device.complete(1)
    assert device.copied == [[]]
