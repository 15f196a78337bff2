"""What every swap engine does: the host's, and that of CUDA on a played device.

tests/gpu has the same on a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from kv_swap.engine import CopiesWith, SwapEngine
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from numpy.typing import NDArray

from tests.support.swap_contract import WINDOWS, Beds, HostBed, NumPyBed, SwapContract


class PlayedBed(NumPyBed):
    """The device runs when something is read of it, or waited for."""

    def __init__(self, cuda: Any, copies_with: CopiesWith, **arguments: Any) -> None:
        self._cuda, self._copies_with = cuda, copies_with
        super().__init__(**arguments)

    def make_arena(self, num_slots: int, slot_bytes: int) -> HostArena:
        from kv_swap.cuda.device import CudaRegistrar

        register = CudaRegistrar(self._device)
        return HostArena(num_slots, slot_bytes, register=register, num_windows=WINDOWS)

    def make_engine(self, layout: KVLayout, arena: HostArena) -> SwapEngine:
        from kv_swap.cuda.engine import CudaSwapEngine

        held = [self.storage, self.token]
        return CudaSwapEngine(layout, arena, self._device, held, copies_with=self._copies_with)

    @property
    def _device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def settle(self) -> None:
        for _ in range(100):
            self._cuda.run()
            if self.engine.wait(0):
                return
        raise AssertionError("copies do not end")

    def close(self) -> None:
        self.settle()  # the device runs by itself for nobody who waits
        super().close()

    def read(self) -> NDArray[np.uint8]:
        seen: list[NDArray[np.uint8]] = []
        self._cuda.queue(lambda: seen.append(super(PlayedBed, self).read()))
        self._cuda.run()
        return seen[0]


@pytest.fixture(params=["host", "kernels", "gates"])
def beds(request: pytest.FixtureRequest) -> Beds:
    make: Callable[..., Any] = HostBed
    if request.param != "host":
        make = partial(PlayedBed, request.getfixturevalue("cuda"), request.param)
    return make


class TestEngines(SwapContract):
    """Of machines without a GPU."""
