"""Undoes, for the tests of `transfer`, what engines of other tests did to this process."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def nothing_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine forwards this package's log to vLLM's, so that a test would see it twice."""
    monkeypatch.setattr(logging.getLogger("kv_swap"), "handlers", [])
