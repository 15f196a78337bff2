"""Wraps methods of vLLM.

A wrapper calls the method that it found, so it works with other plugins' wrappers. It also works
when applied twice: another plugin's wrapper may hide ours if it does not use `functools.wraps`.
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
"""Attribute of a wrapper with its target. `functools.wraps` copies it to wrappers around ours."""

_unlogged: list[str] = []


@dataclass(frozen=True, slots=True)
class Patch:
    """One method of vLLM that the plugin wraps."""

    target: str
    """`module:Class.method`, or `object.method` for an object that a rank finds."""
    around: Method
    """Called instead of the method, with the original method and the call's arguments."""
    where: Literal["process", "front end", "scheduler", "rank"] = "scheduler"
    """Patched in every process, where an engine with our connector is configured, where a scheduler
    is built, or on a single object in a rank's process."""
    needed: Callable[[Version, OffloadConfig], bool] | None = None
    """Says whether an engine needs the patch, by vLLM's version and the configuration; None if all
    engines do."""

    @property
    def method(self) -> str:
        """The method's name."""
        return self.target.rpartition(".")[2]

    def wrap(self, found: Method, *state: Any) -> Method:
        """Return a wrapper of `found`; `around` gets `state` as its first arguments."""

        # `wraps` keeps the signature, by which vLLM converts the arguments of some calls.
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
        """Wrap the method in its class, once.

        A `process` patch skips a vLLM without the method: the plugin may not be in use here.
        """
        module, _, path = self.target.partition(":")
        owner = getattr(importlib.import_module(module), path.partition(".")[0], None)
        if self.where == "process" and not hasattr(owner, self.method):
            return
        found = getattr(owner, self.method)
        if getattr(found, MARK, None) != self.target:
            self.install(owner, found)


def add_listener(patch: Patch, owner: Any, listener: Callable[..., None]) -> None:
    """Make a method of this object alone call `listener` first, with the same arguments."""
    found = vars(owner).get(patch.method) or _method_of_class(owner, patch.method)
    patch.install(owner, found, listener)


def log_new() -> None:
    """Log, at debug level, the patches installed in this process since the last call."""
    if _unlogged:
        logger.debug("kv-offload: patches of vLLM in this process: %s", ", ".join(_unlogged))
        _unlogged.clear()


def _method_of_class(owner: Any, name: str) -> Method:
    """Return a function that looks the method up in the object's class at each call."""
    found = weakref.ref(owner)  # a cycle would keep KV tensors alive until garbage is collected

    @functools.wraps(getattr(type(owner), name))
    def method(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        return getattr(type(alive), name)(alive, *args, **kwargs)

    return method


def notify_first(listener: Callable[..., None], original: Method, *args: Any, **kwargs: Any) -> Any:
    """Call `listener` with the arguments, then the original method."""
    listener(*args, **kwargs)
    return original(*args, **kwargs)
