"""Wraps methods of vLLM.

A wrapper calls the method that it found, so it works with wrappers of other plugins. Each also
works when applied twice: another plugin may hide ours in a wrapper without `functools.wraps`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kv_offload.config import OffloadConfig

logger = logging.getLogger(__name__)

Method = Callable[..., Any]
Version = tuple[int, int]

MARK = "_kv_offload_patch"
"""Attribute of our wrappers that names the target. `functools.wraps` copies it to others'
wrappers."""

_unlogged: list[str] = []


@dataclass(frozen=True, slots=True)
class Setup:
    """Facts that decide which patches a scheduler's process needs."""

    version: Version
    config: OffloadConfig


@dataclass(frozen=True, slots=True)
class Patch:
    """One method of vLLM that the plugin wraps."""

    target: str
    """`module:Class.method`, or `object.method` for an object that a rank finds."""
    around: Method
    """Runs in place of the method, with the method that was found and its arguments."""
    where: Literal["process", "front end", "scheduler", "rank"] = "scheduler"
    """Wrapped in every process, where an engine with our connector is configured, where a scheduler
    is built, or on one object of a rank."""
    needed: Callable[[Setup], bool] | None = None
    """Returns whether an engine needs the patch; None if all engines do."""

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.target.rpartition(".")[2]

    def wrap(self, found: Method, *state: Any) -> Method:
        """Return a wrapper of `found`; `around` gets `state` as its first arguments."""

        # vLLM converts the arguments of some calls by the method's signature, which `wraps`
        # preserves.
        @functools.wraps(found)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.around(*state, found, *args, **kwargs)

        setattr(wrapper, MARK, self.target)
        return wrapper

    def install(self, owner: Any, found: Method, *state: Any) -> None:
        """Wrap `found`, a method of `owner`."""
        setattr(owner, self.method, self.wrap(found, *state))
        _unlogged.append(self.target.rpartition(":")[2])

    def install_on_class(self) -> None:
        """Wrap the method of its class once. In other processes vLLM may lack the method."""
        module, _, path = self.target.partition(":")
        owner = getattr(importlib.import_module(module), path.partition(".")[0], None)
        if self.where == "process" and not hasattr(owner, self.method):
            return  # the plugin may not be in use here
        found = getattr(owner, self.method)
        if getattr(found, MARK, None) != self.target:
            self.install(owner, found)


def add_listener(patch: Patch, owner: Any, listener: Callable[..., None]) -> None:
    """Make a method of this one object call `listener` first, with the same arguments."""
    found = vars(owner).get(patch.method) or _method_of_class(owner, patch.method)
    patch.install(owner, found, listener)


def log_new() -> None:
    """Log, at debug level, the patches that this process got since the last call."""
    if _unlogged:
        logger.debug("kv-offload: patches of vLLM in this process: %s", ", ".join(_unlogged))
        _unlogged.clear()


def _method_of_class(owner: Any, name: str) -> Method:
    """Return a function that calls the method of the object's class at the time of the call."""
    found = weakref.ref(owner)  # a cycle would keep its KV tensors alive until the next collection

    @functools.wraps(getattr(type(owner), name))
    def method(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        return getattr(type(alive), name)(alive, *args, **kwargs)

    return method


def notify_first(listener: Callable[..., None], original: Method, *args: Any, **kwargs: Any) -> Any:
    """Call `listener` with the arguments, then the original method."""
    listener(*args, **kwargs)
    return original(*args, **kwargs)
