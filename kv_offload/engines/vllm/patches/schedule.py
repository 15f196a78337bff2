"""Has vLLM 0.26 and 0.27 take the shortest of the hits of several groups, also with states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def take_the_shortest_hit(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `Scheduler.schedule`."""
    self.has_mamba_layers = False  # read nowhere else once the scheduler has been built
    return original(self, *args, **kwargs)
