"""Fixtures for tests on a real vLLM engine. Everything in this folder is marked `engine`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Copies, engine


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


@pytest.fixture(scope="session", autouse=True)
def frozen_imports(model_folder: Path) -> Iterator[None]:
    """Keep imported modules out of garbage collections: else an engine's life takes 3 s, not 0.3 s.

    vLLM collects several times as an engine starts and ends, and has half a million objects of
    modules. It freezes the heap meanwhile, and thaws all of it in the end: neither happens here. A
    first engine imports what vLLM imports late.
    """
    with engine(model_folder):
        pass
    freeze, unfreeze = gc.freeze, gc.unfreeze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        freeze()
        yield
    unfreeze()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Control over the host engine's copies: hold them, fail them."""
    control = Copies()
    monkeypatch.setattr("kv_swap.host._copy_runs", control.copy_runs)
    yield control
    control.release()
