"""Finds the objects of vLLM that call us, where vLLM hands a connector no reference to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def callers() -> Iterator[Any]:
    """Yield what is called `self` in the caller and in its callers, the nearest first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]
