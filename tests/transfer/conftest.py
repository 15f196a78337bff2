"""A played device, and an undone log: what engines of other tests did to this process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def nothing_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine forwards this package's log to vLLM's, so that a test would see it twice."""
    monkeypatch.setattr(logging.getLogger("kv_swap"), "handlers", [])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The device of all engines of a test; they end while it is there."""
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.support.played_cuda import PlayedCuda

    made = PlayedCuda()
    made.install(monkeypatch)
    yield made
    gc.collect()
