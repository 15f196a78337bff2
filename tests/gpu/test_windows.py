"""Loads from an arena that another process has page-locked; the contract has the rest."""

from __future__ import annotations

import pytest
from kv_swap.cuda.kernel_families import can_pack

from bench.swap.windows import SHAPES, measure
from tests.gpu.caches import torch


@pytest.mark.parametrize(("page_bytes", "packing"), SHAPES)
def test_the_bytes_of_another_process_arrive_and_take_no_memory_of_the_device(page_bytes, packing):
    """`measure` compares the bytes."""
    if packing is not None and not can_pack(torch.cuda.get_device_capability()):
        pytest.skip("this GPU cannot pack")
    row = measure(256 << 20, page_bytes, packing, rounds=3)
    assert row["packed"] == (packing is not None)
    assert row["device_bytes"] <= row["arena_bytes"] // 100
