"""Three kinds of compute to run next to copies, and the effect of one on the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.swap.bed import Copies

DECODE_TOKENS, HIDDEN, WIDE = 32, 4096, 14336
MOST_COPIES = 64

WORKLOADS = ("product", "reduction", "decode")


class Workload:
    """A CUDA graph of some milliseconds. Except for a product, its inputs do not fit in the L2."""

    def __init__(self, torch: Any, name: str, step: Callable[[], object], steps: int) -> None:
        self.name = name
        self._torch = torch
        self._step = step  # holds the tensors that the graph reads
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
        """Queue the work; return its first and last event."""
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with self._torch.cuda.stream(self.stream):
            events[0].record()
            self._graph.replay()
            events[1].record()
        return events[0], events[1]


def make_workloads(torch: Any, names: Sequence[str] = WORKLOADS) -> list[Workload]:
    """Return an 8192-cubed bf16 product, a 2 GiB sum, and 32-row products with 2.4 GB of weights.

    Inputs are random, because a product of zeros runs faster than any real one.
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

    kinds: dict[str, tuple[Callable[[], object], int]] = {
        "product": (lambda: torch.matmul(left, right, out=out), 6),
        "reduction": (lambda: torch.sum(values, dim=0, out=total), 16),
        "decode": (decode, 12),
    }
    return [Workload(torch, name, *kinds[name]) for name in names]


class Decodes:
    """Decode steps with the shape of Llama-3.1-8B: 16 requests of 1,500 tokens each.

    Weights and KV are random and as large as the model's: a step reads 15 GB and 3 GB of them.
    """

    REQUESTS, LENGTH = 16, 1536
    LAYERS, HIDDEN, HEADS, KV_HEADS, CHANNELS, WIDE, WORDS = 32, 4096, 32, 8, 128, 14336, 128256

    def __init__(self, torch: Any) -> None:
        def random(*shape: int) -> Any:
            return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * 0.02

        self._torch = torch
        q_and_kv = (self.HEADS + 2 * self.KV_HEADS) * self.CHANNELS
        self._layers = [
            (
                random(self.HIDDEN, q_and_kv),
                random(self.HIDDEN, self.HIDDEN),
                random(self.HIDDEN, 2 * self.WIDE),
                random(self.WIDE, self.HIDDEN),
            )
            for _ in range(self.LAYERS)
        ]
        self._head = random(self.HIDDEN, self.WORDS)
        self._kv = random(self.LAYERS, 2, self.REQUESTS * self.KV_HEADS, self.LENGTH, self.CHANNELS)
        self._tokens = random(self.REQUESTS, self.HIDDEN)

    def step(self) -> None:
        """Compute one token of every request."""
        torch, rows = self._torch, self._tokens
        for (q_and_kv, out, up, down), (keys, values) in zip(self._layers, self._kv, strict=True):
            q = (rows @ q_and_kv)[:, : self.HIDDEN]
            q = q.reshape(self.REQUESTS * self.KV_HEADS, -1, self.CHANNELS)
            scores = torch.bmm(q, keys.transpose(1, 2)).softmax(-1)
            rows = rows + torch.bmm(scores, values).reshape(self.REQUESTS, -1) @ out
            gate, wide = (rows @ up).chunk(2, -1)
            rows = rows + (torch.nn.functional.silu(gate) * wide) @ down
        (rows @ self._head).argmax(-1)


def beside(
    torch: Any, workload: Workload, copies: Copies, copy_seconds: float, rounds: int
) -> tuple[float, float]:
    """Return the effect of copies on work and of work on copies, as medians over `rounds`.

    The first value is the work's time next to copies over its time alone, the second the seconds of
    a copy next to the work. `copy_seconds` is the time of a copy alone. Copies must run from before
    the work begins until after it ends; if not, the round is repeated with more of them.
    """
    alone, together, copying = [], [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        first, last = workload.start()
        last.synchronize()
        alone.append(first.elapsed_time(last))
        count = int(alone[-1] / 1000 / copy_seconds * 1.3) + 2
        while True:
            milliseconds, seconds, left = _once(torch, workload, copies, count)
            if left or count >= MOST_COPIES:
                break
            count *= 2
        together.append(milliseconds)
        copying.append(seconds)
    return statistics.median(together) / statistics.median(alone), statistics.median(copying)


def _once(torch: Any, workload: Workload, copies: Copies, count: int) -> tuple[float, float, int]:
    """Return the work's milliseconds, a copy's seconds, and the number of copies left at its end.

    If no copy ends before the work does, a copy's seconds are the time until the first copy ends.
    """
    torch.cuda.synchronize()
    began = ends_at = time.perf_counter()
    for _ in range(count):
        copies.start()
    first, last = workload.start()
    ended = 0
    while not last.query() or not ended:
        if new := copies.ended():
            ended += new
            ends_at = time.perf_counter()
    left = rest = count - ended
    while rest > 0:
        rest -= copies.ended()
    return first.elapsed_time(last), (ends_at - began) / ended, left
