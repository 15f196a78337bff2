"""What a copy does to compute beside it: the slowdown of three kinds of work."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

DECODE_TOKENS, HIDDEN, WIDE = 32, 4096, 14336


class Workload:
    """A CUDA graph of some milliseconds, its inputs too large for the L2 unless it is a product."""

    def __init__(self, torch: Any, name: str, step: Callable[[], None], steps: int) -> None:
        self.name = name
        self._torch = torch
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(steps):
                step()

    def start(self) -> tuple[Any, Any]:
        """Queue the work; return its first and its last event."""
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with self._torch.cuda.stream(self.stream):
            events[0].record()
            self._graph.replay()
            events[1].record()
        return events[0], events[1]


def make_workloads(torch: Any) -> list[Workload]:
    """An 8192-cubed bf16 product, a sum over 2 GiB, and products of 32 rows with 2.4 GB of weights.

    Random inputs: a product of zeros runs faster than any real one.
    """

    def random(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    left, right, out = random(8192, 8192), random(8192, 8192), random(8192, 8192)
    values = torch.rand(1 << 29, dtype=torch.float32, device="cuda")
    total = torch.empty((), dtype=torch.float32, device="cuda")
    tokens = random(DECODE_TOKENS, HIDDEN)
    square = [random(HIDDEN, HIDDEN) for _ in range(16)]
    wide = [random(HIDDEN, WIDE) for _ in range(16)]

    def decode() -> None:
        for one, other in zip(square, wide, strict=True):
            torch.matmul(tokens, one)
            torch.matmul(tokens, other)

    return [
        Workload(torch, "product", lambda: torch.matmul(left, right, out=out), 6),
        Workload(torch, "reduction", lambda: torch.sum(values, dim=0, out=total), 16),
        Workload(torch, "decode", decode, 12),
    ]


def beside(
    torch: Any, workload: Workload, copy: Callable[[], Any], copy_seconds: float, rounds: int
) -> tuple[float, float]:
    """Return what copies do to work and work to copies, medians of `rounds`.

    The first is the work's time beside copies over its time alone, the second the seconds of a copy
    beside it: the mean of those that ended before the work did, or the first where none did, whose
    end then ran alone. `copy` queues one copy on a stream of its own, returns that stream and takes
    `copy_seconds` alone. Copies run from before the work begins until after it has ended, else it
    is repeated.
    """
    alone, together, copying = [], [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        first, last = workload.start()
        last.synchronize()
        alone.append(first.elapsed_time(last))
        copies = int(alone[-1] / 1000 / copy_seconds * 1.3) + 2
        while True:
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(copies + 1)]
            for event in events:
                event.record(copy())
            workload.stream.wait_event(events[0])
            first, last = workload.start()
            torch.cuda.synchronize()
            if last.elapsed_time(events[-1]) > 0 or copies > 60:
                break
            copies *= 2
        together.append(first.elapsed_time(last))
        ended = max(1, sum(event.elapsed_time(last) > 0 for event in events[1:]))
        copying.append(events[0].elapsed_time(events[ended]) / 1000 / ended)
    work = statistics.median(together) / statistics.median(alone)
    return work, statistics.median(copying)
