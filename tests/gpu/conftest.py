"""Marks the tests of this folder `gpu`, skips them without a CUDA device, and orders them."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_module

# With 8, the default, more streams share a queue, so work queued after a stream that a test holds
# would wait.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

LONGEST_FIRST = (
    *("test_soak.py", "test_priorities.py", "test_faults.py"),
    *("test_parallel.py", "test_engine.py", "test_lessons.py"),
)
"""With several processes (`-n 16 --dist loadgroup`), all others would wait for a test that comes
last."""


def _cuda_is_available() -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if len(ours) == len(items):
        names = {name: place for place, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: names.get(item.path.name, len(names)))
    available = bool(ours) and _cuda_is_available()
    for item in ours:
        item.add_marker("gpu")
        if not available:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(
    params=[*itertools.product(("0", "1"), (False, True))],
    ids=lambda mode: f"{'V2' if mode[0] == '1' else 'V1'}-{'async' if mode[1] else 'plain'}",
)
def run_in_every_mode(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Run a module whose tokens do not depend on batches, in all runners and scheduling modes."""
    runner, async_scheduling = request.param

    def run(module: str, **arguments: Any) -> dict[str, Any]:
        result: dict[str, Any] = run_module(
            module,
            tmp_path,
            {**arguments, "async_scheduling": async_scheduling},
            timeout_seconds=500,
            VLLM_BATCH_INVARIANT="1",
            VLLM_USE_V2_MODEL_RUNNER=runner,
        )
        print(result)
        assert result["asynchronous"] == async_scheduling
        return result

    return run


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: a run killed by a time limit prints no summary."""
    if report.failed and "tests/gpu/" in report.nodeid and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext}\n{report.capstdout}", flush=True)
