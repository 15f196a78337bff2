"""Wait for other threads and processes, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_SECONDS = 120.0


def wait_until(condition: Callable[[], Any], why: object = "it did not happen") -> None:
    """Wait until a condition holds; after several minutes, fail with `why`.

    It does not use `time.monotonic`, because a test may have stopped that clock.
    """
    end = time.perf_counter() + LIMIT_SECONDS
    while not condition():
        assert time.perf_counter() < end, why() if callable(why) else why
        time.sleep(0.002)
