"""Hold a stream until a test releases it.

A kernel that spins for a fixed time could end too early on a busy host, and then a control would
fail.
"""

from __future__ import annotations

import warnings
from typing import Any

import cupy
import torch

ENDS_SECONDS = 30.0
"""A copy that waits for nothing has ended within this time, on any machine."""
HELD_SECONDS = 0.1
"""A copy that has not ended by then is waiting; one that waits for nothing takes far less."""

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
    """Closed until `open`.

    CUDA must have loaded everything that it loads at first use before the gate holds a stream.
    """

    def __init__(self) -> None:
        self._open = torch.ones(1, dtype=torch.int32).pin_memory()
        self._kernel = cupy.RawKernel(_SOURCE, "hold")
        self.hold()
        torch.cuda.synchronize()
        self._open.fill_(0)

    def hold(self) -> None:
        """Hold up later work on the current stream."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # CuPy 13 lacks its replacement
            stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            self._kernel((1,), (1,), (self._open.data_ptr(), cupy.uint64(_LIMIT_NS)))

    def open(self, engine: Any, *, after_copies: bool) -> None:
        """Open, after asserting that the engine's copies have, or have not, ended."""
        ended = engine.wait(ENDS_SECONDS if after_copies else HELD_SECONDS)
        self.release()
        assert ended is after_copies

    def release(self) -> None:
        """Open."""
        self._open.fill_(1)
