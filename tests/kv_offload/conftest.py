"""Settings for the tests of `kv_offload`; tests that need vLLM are skipped without it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


VLLM = r"vllm|played_\w+|simulated_engine|configurations|test_host_pool"
TORCH = r"torch|tests\.support\.rank|manual_copies"


@functools.cache
def imports(path: Path, names: str) -> bool:
    """Return whether a module of tests imports a package, or a module that plays parts of it."""
    return re.search(rf"^(from|import) .*\b({names})\b", path.read_text(), re.MULTILINE) is not None


def uses_vllm(path: Path) -> bool:
    return imports(path, VLLM)


class NeedsPackage(pytest.Module):
    """Imports vLLM without its warnings; skipped, with the reason, without vLLM or torch."""

    def collect(self) -> list[pytest.Item]:
        if imports(self.path, TORCH):
            pytest.importorskip("torch", reason="needs torch, which is not installed")
        if uses_vllm(self.path):
            pytest.importorskip(
                "vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed"
            )
        return list(super().collect())


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return NeedsPackage.from_parent(parent, path=module_path)


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
    """The time of the monotonic clock, in a list of one; it stands still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now
