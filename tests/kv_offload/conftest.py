"""Settings for the tests of `kv_offload`; those that need vLLM skip where it is not installed."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


IMPORT = re.compile(
    r"^(from|import) .*\b(vllm|played_\w+|simulated_engine|configurations)\b", re.MULTILINE
)


@functools.cache
def uses_vllm(path: Path) -> bool:
    """Whether a module of tests imports vLLM, or what plays parts of it."""
    return IMPORT.search(path.read_text()) is not None


class NeedsVllm(pytest.Module):
    """Imports vLLM without its warnings; is skipped, with the reason, where there is none."""

    def collect(self) -> list[pytest.Item]:
        pytest.importorskip(
            "vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed"
        )
        return list(super().collect())


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return NeedsVllm.from_parent(parent, path=module_path) if uses_vllm(module_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM's own warnings are not ours to fix."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and uses_vllm(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))


def _both(name: str, *ids: str) -> Callable[..., bool]:
    """Return a fixture that builds all played engines of a test without a setting, and with it."""

    @pytest.fixture(params=[False, True], ids=ids, name=name)
    def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
        monkeypatch.setattr(f"tests.support.played_engine.PlayedEngine.{name}", request.param)
        return bool(request.param)

    return both


beside = _both("beside", "reports", "beside")
async_scheduling = _both("async_scheduling", "sync", "async")
replaces_resumed = _both("replaces_resumed", "V1", "V2")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock, in an only element; it stands until the test moves it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now
