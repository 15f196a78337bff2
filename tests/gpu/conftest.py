"""Marks the tests of this folder `gpu` and skips them where there is no CUDA device."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest


def _cuda_is_available() -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    available = bool(ours) and _cuda_is_available()
    for item in ours:
        item.add_marker("gpu")
        if not available:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
