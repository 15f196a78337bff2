"""Fixtures for tests on a real vLLM engine. Everything in this folder is marked `engine`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Copies


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; vLLM's own warnings are not ours to fix."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("engine")
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Control over the host engine's copies: hold them, fail them."""
    control = Copies()
    monkeypatch.setattr("kv_swap.host.transfers.copy_runs", control.copy_runs)
    yield control
    control.release()
