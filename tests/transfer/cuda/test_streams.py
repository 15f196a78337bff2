"""Which calls of CUDA a copy stream makes, on which device; `test_engine.py` shows the waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from kv_swap.cuda import streams  # noqa: E402
from kv_swap.cuda.kernel_path import KernelPath  # noqa: E402
from kv_swap.cuda.lane import Lane  # noqa: E402
from kv_swap.cuda.streams import CopyStream  # noqa: E402
from kv_swap.engine import Direction, SwapJob  # noqa: E402

from tests.support.registrars import Registrar  # noqa: E402

COPIES, OUTPUT, COMPUTE = 100, 200, 300


class FakeCuda:
    """The calls that were made, and the device and stream that are current."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.device = 0
        self.num_events = 0
        self.failing: str | None = None
        self.runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            eventRecord=lambda event, stream: self.note("record", event, stream),
            streamWaitEvent=lambda stream, event: self.note("wait", stream, event),
        )
        self.cuda = SimpleNamespace(runtime=self.runtime, Device=self.current)

    def note(self, *call: Any) -> None:
        if self.failing == call[0]:
            raise RuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        self.calls.append((self.device, *call))

    @contextmanager
    def current(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls

    def event(self, enable_timing: bool = False) -> Any:
        self.num_events += 1
        return SimpleNamespace(cuda_event=self.num_events, record=lambda stream: None)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(streams, "import_cupy", lambda: fake)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=COPIES, device=device)
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda index: COMPUTE + index,
        raising=False,
    )
    return fake


def make_stream(num_events: int = 2, output: bool = False, index: int = 0) -> CopyStream:
    awaited = SimpleNamespace(cuda_stream=OUTPUT) if output else None
    return CopyStream(torch.device("cuda", index), num_events, awaited)  # type: ignore[arg-type]


def test_default_streams_are_those_of_the_device_of_the_copies(cuda: FakeCuda) -> None:
    stream = make_stream(output=True, index=1)
    event = stream.wait_stream()
    stream.make_compute_wait(0, event)
    assert [call[0] for call in cuda.take()] == [1] * 5
    assert cuda.device == 0


def test_events_are_made_once(cuda: FakeCuda) -> None:
    stream = make_stream(num_events=2, output=True)
    made = cuda.num_events
    for _ in range(3):
        stream.recycle(stream.wait_stream(), stream.record())
    assert cuda.num_events == made
    for _ in range(3):
        stream.record()
    assert cuda.num_events == made + 1


def test_what_a_job_asks_of_cuda(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the two calls that order it stands before its launch."""
    kernel: Any = SimpleNamespace(launch=lambda *args: cuda.note("launch"))
    path = KernelPath(Direction.STORE, kernel, 4096, Registrar())
    lane = Lane(Direction.STORE, path, make_stream())
    made = cuda.num_events
    lane.submit(SwapJob(1, Direction.STORE, np.zeros((1, 2), np.int32)), 4096)
    assert [call[1] for call in cuda.take()] == ["record", "wait", "launch", "record"]
    assert cuda.num_events == made
    cuda.failing = "wait"
    lane.submit(SwapJob(2, Direction.STORE, np.zeros((1, 2), np.int32)), 4096)
    assert [call[1] for call in cuda.take()] == ["record"], "what cannot be ordered is not launched"
