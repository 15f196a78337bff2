"""Settings for all tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def log_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the packages log reaches `caplog`, once, though the plugin may hand it to vLLM's log."""
    for name in ("kv_offload", "kv_swap"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
