"""The error tree of `kv_offload`; `transfer` has its own in `kv_swap.errors`.

A message names the value, the limit and the remedy. Its text begins with `kv-offload: `, so that it
can be found in an engine's log. An error that combines several problems has several arguments.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self


class KVOffloadError(Exception):
    """Base of every error that this package raises."""

    @property
    def message(self) -> str:
        """All problems on one line, so that a search for `kv-offload:` in a log shows them all."""
        problems = [str(problem) for problem in self.args]
        if len(problems) < 2:
            return "".join(problems)
        return " ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))

    def __str__(self) -> str:
        """Return the message, prefixed with the plugin's name."""
        return f"kv-offload: {self.message}"


class ConfigError(KVOffloadError, ValueError):
    """The configuration is missing, malformed, out of range or contradictory."""


class UnsupportedError(KVOffloadError, RuntimeError):
    """The engine's version, model or settings are unsupported; refused at start, never guessed."""


class CapacityError(KVOffloadError, RuntimeError):
    """The requested memory does not exist, is not available, or cannot hold a single slot."""


class ServerError(KVOffloadError, RuntimeError):
    """A server is unreachable, is not vLLM, or runs without the plugin."""


class RequestError(KVOffloadError, ValueError):
    """A request's `kv_transfer_params` are invalid; only that request is refused."""


class Problems:
    """Collects errors, so that a user sees all of them at once.

    A `with problems:` block that raises a `KVOffloadError` ends there, and the code after it runs.
    """

    def __init__(self) -> None:
        self._found: list[KVOffloadError] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, KVOffloadError):
            self._found.append(error)
        return isinstance(error, KVOffloadError)

    def raise_all(self) -> None:
        """Raise one error with all collected problems, if any, of the type of the first."""
        if not self._found:
            return
        first, messages = self._found[0], [arg for error in self._found for arg in error.args]
        if len(self._found) == 1:
            raise first
        raise type(first)(*dict.fromkeys(messages)) from first
