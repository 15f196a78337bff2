"""Fixtures of the tests of the scheduler's half."""

from __future__ import annotations

import pytest


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock, in an only element; it stands until the test moves it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now
