"""Fixtures for tests on a real vLLM engine. Everything in this folder is marked `engine`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from vllm.platforms.cpu import CpuPlatform

from tests.engine.copies import Copies
from tests.engine.harness import engine
from tests.support import forked, imports, processes
from tests.support.latents import cache_prefixes_of_latents

HERE = Path(__file__).parent
ENGINE_SECONDS = 1800
"""Ends tests that hang. A test may start five processes that import vLLM, each of which takes a
minute when four others compete for the core."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; vLLM's own warnings are not ours to fix."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("engine")
            item.add_marker(pytest.mark.filterwarnings("default"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(ENGINE_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork this process while it has no other thread, if tests of this folder run."""
    if any(HERE in item.path.parents for item in session.items):
        forked.start()


def pytest_sessionfinish() -> None:
    """Stop the fork."""
    if forked.start.cache_info().currsize:
        forked.start().close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session", autouse=True)
def frozen_imports(model_folder: Path) -> Iterator[None]:
    """Exclude modules from garbage collection; the first engine imports what vLLM imports late.

    Before it starts a kind of model, vLLM inspects it in a process that imports all of vLLM, unless
    an earlier run left the result in `VLLM_CACHE_ROOT`. Here it does so in this process.
    """
    with (
        mock.patch.object(processes, "LIMIT_SECONDS", ENGINE_SECONDS - 300),
        mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda call: call()),
    ):
        with engine(model_folder):
            pass
        with imports.frozen():
            yield


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["forked", "spawned"]
)
def forks(request: pytest.FixtureRequest) -> bool:
    """Whether an engine forks its processes; spawned ones import vLLM themselves."""
    return bool(request.param)


@pytest.fixture
def cached_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines of this process cache prefixes of latents until the test ends."""
    name = "check_and_update_config"
    monkeypatch.setattr(CpuPlatform, name, getattr(CpuPlatform, name))
    cache_prefixes_of_latents()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Control over the host engine's copies: hold or fail them."""
    control = Copies()
    monkeypatch.setattr("kv_swap.host.transfers.copy_runs", control.copy_runs)
    yield control
    control.release()
