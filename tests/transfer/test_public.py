"""The public face, and the example that uses nothing else."""

from __future__ import annotations

import ast
import inspect
import runpy
from pathlib import Path
from typing import Any

import kv_swap
import pytest
from kv_swap import errors
from kv_swap.layout import TensorDescription

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLE = Path(__file__).parents[2] / "transfer" / "example.py"


NAMES = """
Completion CopyError DeviceError Direction EngineKind JobError KVLayout LayoutError MemoryRoom
Packing PinnedMemoryError Region SharedMemory SwapEngine SwapJob TensorDescription TierError
TransferError create_engine numa_node
"""


def test_the_public_names():
    """A name that goes, or changes, breaks somebody; a new one is kept for good."""
    assert kv_swap.__all__ == NAMES.split()
    assert all(hasattr(kv_swap, name) for name in kv_swap.__all__)


def test_every_error_is_public_and_in_the_tree():
    """Whoever catches the base catches all."""
    for name, error in inspect.getmembers(errors, inspect.isclass):
        assert name in kv_swap.__all__
        assert issubclass(error, kv_swap.TransferError)


def test_the_example_brings_back_exactly_the_blocks_that_it_stored():
    tensor = torch.arange(8.0 * 64).reshape(8, 64)
    expected = torch.zeros_like(tensor)
    expected[[1, 4]] = tensor[[1, 4]]
    runpy.run_path(str(EXAMPLE))["round_trip"](tensor, [(1, 0), (4, 2)])
    assert torch.equal(tensor, expected)


def test_the_example_needs_the_public_face_only_and_is_short():
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 30
    modules = {
        node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
    }
    assert modules == {"kv_swap"}


def test_a_tensor_with_gaps_between_its_blocks_is_described():
    tensor = torch.zeros(6, 64, dtype=torch.float16)[:, :32]
    described = TensorDescription.of("kv", tensor, 3)
    assert described == TensorDescription(
        "kv", tensor.data_ptr(), (6, 32), (128, 2), 2, block_dim=0, page_bytes=128
    )
