"""The example of the public face, on a CUDA tensor."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.gpu.caches import torch

EXAMPLE = Path(__file__).parents[2] / "transfer" / "example.py"


def test_the_example_brings_back_exactly_the_blocks_that_it_stored():
    tensor = torch.arange(8.0 * 64, device="cuda").reshape(8, 64)
    expected = torch.zeros_like(tensor)
    expected[[1, 4]] = tensor[[1, 4]]
    runpy.run_path(str(EXAMPLE))["round_trip"](tensor, [(1, 0), (4, 2)])
    assert torch.equal(tensor, expected)
