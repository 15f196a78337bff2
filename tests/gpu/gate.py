"""Holds a stream up until a test says so; a kernel that spins for a time is outlasted by a host
that others keep busy, and then a control fails."""

from __future__ import annotations

import warnings
from typing import Any

import cupy
import torch

ENDS_SECONDS = 30.0
"""Within this a copy that waits for nothing has ended, on any machine."""
HELD_SECONDS = 0.1
"""A copy that has not ended by then waits; one that waits for nothing takes far less."""

_SOURCE = r"""
extern "C" __global__ void hold(const volatile int* open, unsigned long long limit_ns) {
  unsigned long long began, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (!*open && now - began < limit_ns);
}
"""
_LIMIT_NS = 60 * 10**9
"""After this the gate opens by itself, so that a failing test ends."""


class Gate:
    """Closed until `open`. What CUDA loads at first use must have been used before it holds."""

    def __init__(self) -> None:
        self._open = torch.ones(1, dtype=torch.int32).pin_memory()
        self._kernel = cupy.RawKernel(_SOURCE, "hold")
        self.hold()
        torch.cuda.synchronize()
        self._open.fill_(0)

    def hold(self) -> None:
        """Hold up what is queued on the current stream from here on."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # what replaces it CuPy 13 lacks
            stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            self._kernel((1,), (1,), (self._open.data_ptr(), cupy.uint64(_LIMIT_NS)))

    def open(self, engine: Any, *, after_copies: bool) -> None:
        """Open, and assert that the engine's copies have ended before; or that they have not."""
        ended = engine.wait(ENDS_SECONDS if after_copies else HELD_SECONDS)
        self.release()
        assert ended is after_copies

    def release(self) -> None:
        """Open."""
        self._open.fill_(1)
