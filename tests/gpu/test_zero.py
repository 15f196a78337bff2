"""Zeroing on a CUDA device: exactly the pages of the given blocks, in order, without waiting."""

from __future__ import annotations

import time

import numpy as np
import pytest
from kv_swap.cuda.zeroing import BlockZeroer
from kv_swap.errors import JobError

from tests.gpu.caches import KIB, make_cache, make_engine, torch
from tests.gpu.gate import Gate


@pytest.mark.parametrize(
    ("pages", "count"),
    [
        ([(16, 48)], 1),
        ([(4 * KIB, 8 * KIB), (48, 64)], 60),
        ([(100_000, 131_072), (16, 16)], 17),
        ([(64, 64)], 12_293),
        ([(320 * KIB, 320 * KIB)], 8_000),  # offsets beyond 32 bits
    ],
)
def test_zeroes_exactly_the_pages_of_the_blocks(pages, count):
    cache = make_cache(count + 40, pages)
    zeroer = BlockZeroer(cache.layout, cache.storage.device)
    cache.storage.fill_(5)
    blocks = np.random.default_rng(count).permutation(count + 40)[:count].tolist()
    zeroer.zero(blocks)
    for tensor, (page_bytes, _) in zip(cache.tensors, pages, strict=True):
        zeroed = torch.zeros(count + 40, dtype=torch.bool, device="cuda")
        zeroed[blocks] = True
        assert not tensor[zeroed, :page_bytes].any()
        assert (tensor[~zeroed] == 5).all()
        assert (tensor[:, page_bytes:] == 5).all(), "gaps are left alone"


def test_zeroing_waits_for_compute_and_the_host_does_not():
    """Many times, in many regions: more than a few launches are queued after compute."""
    engine, cache, _ = make_engine(64, [(4 * KIB, 8 * KIB)] * 16, 8)
    gate = Gate()
    with torch.cuda.stream(torch.cuda.Stream()):
        cache.storage.fill_(1)
        engine.zero_blocks([5])  # torch makes its pools now
        gate.hold()
        cache.storage.fill_(5)
        began = time.perf_counter()
        for block in range(20):
            engine.zero_blocks([block, 63])
        assert time.perf_counter() - began < 1
        assert not torch.cuda.current_stream().query()
        gate.release()
        blocks = cache.blocks()
    assert not blocks[[*range(20), 63]].any()
    assert (blocks[20:63] == 5).all()
    with pytest.raises(JobError, match="block 64 does not exist"):
        engine.zero_blocks([64])
    engine.close()
