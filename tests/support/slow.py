"""Parameters of which `make test` tries the first, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_is_slow(values: Iterable[object], first: int = 1) -> list[Any]:
    """Return values or tuples for `parametrize`; all after the `first` ones are marked `slow`."""
    slow = pytest.mark.slow
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=slow if at >= first else ()) for at, row in enumerate(rows)]
