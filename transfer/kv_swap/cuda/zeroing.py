"""Zeroes blocks with torch, because a failed load may leave NaNs in them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kv_swap.layout import KVLayout, Region

if TYPE_CHECKING:
    import torch

_WORD_BYTES = 8
"""Addresses, pages and strides of a layout are multiples of 16 bytes."""


def pages_of(region: Region, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Return a region's pages, int64 of shape `(num_blocks, words)`. Keeps no memory alive."""
    import torch

    memory = SimpleNamespace(
        __cuda_array_interface__={
            "version": 3,
            "typestr": "<i8",
            "data": (region.address, False),
            "shape": (num_blocks, region.page_bytes // _WORD_BYTES),
            "strides": (region.block_stride_bytes, _WORD_BYTES),
        }
    )
    return torch.as_tensor(memory, device=device)


def send(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return block ids as an int64 tensor on the device, copied on the current stream."""
    import torch

    # A copy from pageable memory would wait for the stream.
    return torch.tensor(blocks, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


class BlockZeroer:
    """Zeroes pages of any dtype whose zero has all bits clear, such as bf16, fp8 and int8."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self._device = device
        self._pages = [pages_of(region, layout.num_blocks, device) for region in layout.regions]
        # CUDA loads a kernel at its first use and may then wait for all running work: do it now.
        send([0], device).index_fill_(0, send([0], device), 0)

    def zero(self, blocks: Sequence[int]) -> None:
        """Queue the zeroing of every page of `blocks` on the current stream, one launch per region.

        Torch allocates 8 bytes per block on the device for the list. Raises `RuntimeError` from
        CUDA, or if memory is short; some pages may then be zeroed.
        """
        listed = send(blocks, self._device)
        for pages in self._pages:
            pages.index_fill_(0, listed, 0)
