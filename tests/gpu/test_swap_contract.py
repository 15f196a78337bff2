"""The contract of every swap engine, on a CUDA device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.engine import CopiesWith, SwapEngine
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from numpy.typing import NDArray

from tests.gpu.caches import KIB, make_arena, make_cache, torch
from tests.support.swap_contract import BLOCKS, WINDOWS, Bed, Beds, SwapContract

PAGES = [(8 * KIB, 8 * KIB), (1040, 2048), (16, 32), (96 * KIB, 96 * KIB)]


class DeviceBed(Bed):
    def __init__(self, copies_with: CopiesWith, **arguments: Any) -> None:
        self._copies_with = copies_with
        super().__init__(**arguments)

    def make_cache(self) -> KVLayout:
        self._cache = make_cache(BLOCKS, PAGES)
        return self._cache.layout

    def make_arena(self, num_slots: int, slot_bytes: int) -> HostArena:
        return make_arena(self._cache, num_slots, slot_bytes, WINDOWS)

    def make_engine(self, layout: KVLayout, arena: HostArena) -> SwapEngine:
        storage = self._cache.storage
        return CudaSwapEngine(
            layout, arena, storage.device, [storage, self.token], copies_with=self._copies_with
        )

    def write(self, blocks: NDArray[np.uint8]) -> None:
        parts = torch.from_numpy(blocks).split([page_bytes for page_bytes, _ in PAGES], 1)
        for pages, part in zip(self._cache.pages(self._cache.storage), parts, strict=True):
            pages.copy_(part)

    def read(self) -> NDArray[np.uint8]:
        blocks: NDArray[np.uint8] = self._cache.blocks().numpy()
        return blocks


@pytest.fixture(params=["kernels", "gates"])
def beds(request: pytest.FixtureRequest) -> Beds:
    return partial(DeviceBed, request.param)


class TestDevice(SwapContract):
    """Over kernels and over the copy engine."""
