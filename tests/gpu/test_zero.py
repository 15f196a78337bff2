"""Zeroing on a CUDA device: exactly the pages of the given blocks, also replayed from a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kv_swap.cuda import zero
from kv_swap.cuda.launcher import write_list
from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.memory.arena import HostArena

from tests.gpu.caches import KIB, Cache, Pages, make_cache, torch


def expect_zeroed(cache: Cache, blocks: Any) -> Any:
    """The storage, all 5s before, with the pages of `blocks` zeroed and gaps untouched."""
    expected = torch.full_like(cache.storage, 5)
    for pages in cache.pages(expected):
        pages[torch.as_tensor(blocks, dtype=torch.int64, device="cuda")] = 0
    return expected


def make_zeroer(cache: Cache) -> zero.BlockZeroer:
    device = cache.storage.device
    return zero.BlockZeroer(cache.layout, device, CudaRegistrar(device))


@pytest.mark.parametrize(
    ("pages", "count"),
    [
        ([(16, 48)], 1),
        ([(4 * KIB, 8 * KIB), (48, 64)], 60),
        ([(100_000, 131_072), (16, 16)], 17),
        ([(64, 64)], 3 * zero.MAX_BLOCKS + 5),
    ],
)
def test_zeroes_exactly_the_pages_of_the_blocks(pages: Pages, count: int) -> None:
    cache = make_cache(count + 40, pages)
    zeroer = make_zeroer(cache)
    cache.storage.fill_(5)
    blocks = np.random.default_rng(count).permutation(count + 40)[:count]
    zeroer.zero(blocks.tolist())
    zeroer.synchronize()
    assert torch.equal(cache.storage, expect_zeroed(cache, blocks))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_zero_bytes_are_zeros_of_every_cache_dtype(dtype: Any) -> None:
    cache = make_cache(8, [(4 * KIB, 4 * KIB)])
    zeroer = make_zeroer(cache)
    cache.storage.fill_(0xFF)
    zeroer.zero([3])
    values = cache.tensors[0].view(dtype).float()
    assert (values[3] == 0).all()
    assert not (values[2] == 0).any()


def test_more_launches_than_the_ring_has_lists() -> None:
    cache = make_cache(64, [(4 * KIB, 4 * KIB)])
    zeroer = make_zeroer(cache)
    cache.storage.fill_(5)
    torch.cuda._sleep(20_000_000)
    for block in range(3 * zero.RING_ENTRIES):
        zeroer.zero([block])
    zeroer.synchronize()
    assert not cache.tensors[0][: 3 * zero.RING_ENTRIES].any()
    assert (cache.tensors[0][3 * zero.RING_ENTRIES :] == 5).all()


def test_captured_launch_replays_another_list() -> None:
    pages = [(4 * KIB, 8 * KIB), (48, 64)]
    cache = make_cache(64, pages)
    device = cache.storage.device
    kernel = zero.ZeroKernel(cache.layout, device)
    lists = HostArena(1, zero.LIST_BYTES, register=CudaRegistrar(device))
    target = lists.view()[0]
    kernel.launch(lists.address, torch.cuda.current_stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(lists.address, torch.cuda.current_stream())
    rng = np.random.default_rng(0)
    for count in (1, 64, 0, 17):
        blocks = rng.permutation(64)[:count]
        write_list(target, blocks.astype(np.int32))
        cache.storage.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cache.storage, expect_zeroed(cache, blocks))
