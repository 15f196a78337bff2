"""The hooks of a connector, for tests that make one of them raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

HOOKS = (
    "offload_scheduler.match",
    "offload_scheduler.allocated",
    "offload_scheduler.plan_step",
    "offload_scheduler.apply_report",
    "offload_scheduler.finished",
    "offload_scheduler.take_stats",
    "offload_worker.submit_stores",
    "offload_worker.start_copies",
    "offload_worker.start_kv_transfers",
    "offload_worker.prepare_store_kv",
    "offload_worker.poll",
    "offload_worker.report",
)
"""The methods that the connector's hooks call, on the scheduler and on the worker side."""


def wrap_hook(
    connector: Any, hook: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a method such as those of `HOOKS` by `wrap` of it, if the connector has that side."""
    *half, name = hook.split(".")
    part = getattr(connector, half[0]) if half else connector
    if part is not None:
        setattr(part, name, wrap(getattr(part, name)))


def raise_once(hook: str, *connectors: Any, when: int = 0) -> list[str]:
    """Make a method raise on call number `when`, before it does its work.

    The returned list is no longer empty once it has raised.
    """
    raised: list[str] = []
    calls = itertools.count()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def raising(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == when:
                raised.append(hook)
                raise RuntimeError(f"injected into {hook}")
            return original(*args, **kwargs)

        return raising

    for connector in connectors:
        wrap_hook(connector, hook, wrap)
    return raised
