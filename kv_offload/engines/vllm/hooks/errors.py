"""Handles errors in hooks: for the call that failed, the engine continues without the plugin."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Hook = TypeVar("Hook", bound=Callable[..., Any])


class HookErrors:
    """Counts exceptions in hooks; logs the first one of each hook with its traceback."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._new = 0

    def caught(self, hook: str) -> None:
        """Count the current exception, and log it if it is the hook's first."""
        self._new += 1
        if hook not in self._seen:
            self._seen.add(hook)
            logger.exception(
                "kv-offload: an error in its hook %s. The engine continues without host memory "
                "for this call; further errors of this hook are only counted (hook_errors). "
                "Please report this",
                hook,
            )

    def take(self) -> int:
        """Return the number of exceptions since the last call."""
        new, self._new = self._new, 0
        return new


def survives(instead: Callable[..., Any]) -> Callable[[Hook], Hook]:
    """Decorate a connector's hook: if it raises, return `instead(self, *arguments)`.

    `instead` must ensure that no request waits for a report that never arrives or reads KV that was
    not loaded.
    """

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - it would end the engine
                self.hook_errors.caught(hook.__name__)
                return instead(self, *args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate
