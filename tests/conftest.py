"""Settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# What a user's shell may have, and what changes an answer that a test looks at.
for name in (
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"),
    *("KV_OFFLOAD_CONFIG_FILE", "PROMETHEUS_MULTIPROC_DIR"),
):
    os.environ.pop(name, None)
# Servers of tests are on loopback, which no proxy can reach.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"

try:
    import hypothesis
except ImportError:  # the tests that need it say so
    pass
else:
    # The same examples on every machine, however slow it is: a failure is the change's that shows
    # it first. Tests that hunt for the unexpected have seeds of their own, and print them.
    hypothesis.settings.register_profile(
        "everywhere",
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("everywhere")


MOST_WORKERS = 4
"""Each takes 1.3 GB once it has imported vLLM, and the engines that it starts take more."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many tests run at a time with `-n auto`: `make test` has that."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def pytest_collection_finish() -> None:
    """Keep modules out of the garbage collections that tests ask for: vLLM's take 0.3 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory: host pools must be there, and disks that only lose processes may be."""
    with tempfile.TemporaryDirectory(prefix="kv-offload-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def log_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the packages log reaches `caplog`, once, though the plugin may hand it to vLLM's log."""
    for name in ("kv_offload", "kv_swap"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
