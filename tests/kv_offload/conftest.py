"""Settings for the tests of `kv_offload`; those that need vLLM skip where it is not installed."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture(params=[False, True], ids=["reports", "beside"])
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether an only rank of a played engine is asked what has ended, besides reporting it."""
    monkeypatch.setattr("tests.support.played_engine.PlayedEngine.beside", request.param)
    return bool(request.param)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock, in an only element; it stands until the test moves it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now
