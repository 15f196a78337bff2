"""Waits for what other threads and processes do, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_SECONDS = 120.0


def wait_until(condition: Callable[[], Any], why: object = "it did not happen") -> None:
    """Wait until a condition holds; fail, saying `why`, where it does not for minutes.

    Not `time.monotonic`: a test may have that stand.
    """
    end = time.perf_counter() + LIMIT_SECONDS
    while not condition():
        assert time.perf_counter() < end, why() if callable(why) else why
        time.sleep(0.002)
