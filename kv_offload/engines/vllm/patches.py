"""Every patch of vLLM, and how it is installed. There is no other.

`docs/design/patches.md` says of each why it is needed and what is lost without it. A wrapper calls
the method that it found, so it works with wrappers that other plugins set before or after. Each
also works when set twice, which happens where another plugin hides ours behind a wrapper without
`functools.wraps`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kv_offload.engines.vllm import drain, preemption, weights
from kv_offload.engines.vllm.start import command_line
from kv_offload.engines.vllm.versions import NEWEST, OLDEST

if TYPE_CHECKING:
    from kv_offload.config import OffloadConfig

logger = logging.getLogger(__name__)

Method = Callable[..., Any]
Version = tuple[int, int]

MARK = "_kv_offload_patch"
"""Attribute of our wrappers: the target. `functools.wraps` of others' copies it to theirs."""

_unlogged: list[str] = []


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides which patches a scheduler's process needs."""

    version: Version
    config: OffloadConfig
    holds_state: bool
    """Whether the model has layers with states (Mamba, gated delta nets)."""
    is_member: bool
    """Whether the connector is inside a MultiConnector."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One method of vLLM that the plugin wraps."""

    target: str
    """`module:Class.method`, or `object.method` of an object that a rank finds."""
    around: Method
    """Runs in place of the method: gets the method that was found, then its arguments."""
    where: Literal["process", "scheduler", "rank"] = "scheduler"
    """Wrapped in every process, where a scheduler is built, or on one object of a rank."""
    versions: tuple[Version, Version] = (OLDEST, NEWEST)
    needed: Callable[[Setup], bool] | None = None
    """Whether an engine needs the patch; None where all do."""

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.target.rpartition(".")[2]

    def wrap(self, found: Method, *state: Any) -> Method:
        """Return the wrapper of a method; `around` gets `state` first."""

        # vLLM converts the arguments of some calls by the method's signature, hence `wraps`.
        @functools.wraps(found)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.around(*state, found, *args, **kwargs)

        setattr(wrapper, MARK, self.target)
        return wrapper

    def install(self, owner: Any, found: Method, *state: Any) -> Method:
        """Wrap `found` where `owner` has it, unless that is our wrapper; return the wrapper."""
        if getattr(found, MARK, None) == self.target:
            return found
        wrapper = self.wrap(found, *state)
        setattr(owner, self.method, wrapper)
        _unlogged.append(self.target.rpartition(":")[2])
        return wrapper


def install_in_process() -> None:
    """Patch what every process needs that has loaded it; a second call replaces nothing."""
    for patch in PATCHES:
        if patch.where == "process" and patch.target.partition(":")[0] in sys.modules:
            _wrap_class(patch)


def install_for_scheduler(setup: Setup) -> None:
    """Patch what this engine and configuration need; a second call replaces nothing."""
    for patch in PATCHES:
        oldest, newest = patch.versions
        needed = patch.needed is None or patch.needed(setup)
        if patch.where == "scheduler" and oldest <= setup.version <= newest and needed:
            _wrap_class(patch)


def _wrap_class(patch: Patch) -> None:
    module, _, path = patch.target.partition(":")
    owner = getattr(importlib.import_module(module), path.partition(".")[0], None)
    if patch.where == "process" and not hasattr(owner, patch.method):
        return  # the plugin may not be in use here
    patch.install(owner, getattr(owner, patch.method))


def tell(patch: Patch, owner: Any, listener: Callable[..., None]) -> None:
    """Have a method of this one object call `listener` first, with the same arguments.

    A second call for the object wraps nothing: the wrapper calls both listeners.
    """
    listeners: list[Callable[..., None]] = []
    found = vars(owner).get(patch.method) or _method_of_class(owner, patch.method)
    wrapper: Any = patch.install(owner, found, listeners)
    if wrapper is not found:
        wrapper.listeners = listeners
    wrapper.listeners.append(listener)


def log_new() -> None:
    """Log which patches this process got since the last call."""
    if _unlogged:
        logger.info("kv-offload: patches of vLLM in this process: %s", ", ".join(_unlogged))
        _unlogged.clear()


def _method_of_class(owner: Any, name: str) -> Method:
    """Return what calls the method that the object's class has at the time of the call."""
    found = weakref.ref(owner)  # a cycle would keep its KV tensors until the next collection

    @functools.wraps(getattr(type(owner), name))
    def method(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        return getattr(type(alive), name)(alive, *args, **kwargs)

    return method


def _note_replicas_and_check(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.kv_transfer_config is None:
        command_line.log_not_in_use()
        return original(self, *args, **kwargs)
    # Imported here: most processes never need it.
    from kv_offload.engines.vllm.start import early, ranks

    early.check_arguments(self)
    config = original(self, *args, **kwargs)
    ranks.note_local_replicas(config)
    early.check_settings(config)
    if not early.asks_for_us(config.kv_transfer_config):
        command_line.log_other_connector(config.kv_transfer_config.kv_connector)
    return config


def _take_the_shortest_hit(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    self.has_mamba_layers = False  # read nowhere else once the scheduler has been built
    return original(self, *args, **kwargs)


def _observe_dictionaries(
    original: Method, self: Any, transfer_stats_data: Any, engine_idx: int = 0
) -> Any:
    figures = transfer_stats_data.items()
    as_sent = {k: v if isinstance(v, dict) else {"data": v.data} for k, v in figures}
    return original(self, as_sent, engine_idx)


def _tell_first(
    listeners: list[Callable[..., None]], original: Method, *args: Any, **kwargs: Any
) -> Any:
    for listener in listeners:
        listener(*args, **kwargs)
    return original(*args, **kwargs)


EXECUTE_MODEL = Patch("model runner.execute_model", _tell_first, "rank")
LOAD_WEIGHTS = Patch("model.load_weights", _tell_first, "rank")
PATCHES = (
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config", _note_replicas_and_check, "process"
    ),
    Patch("vllm.v1.engine.core:EngineCore.reset_prefix_cache", drain.reset_after_drain),
    Patch("vllm.v1.engine.core:EngineCore.collective_rpc", weights.watch_call),
    Patch(
        "vllm.v1.engine.core:EngineCore.sleep",
        weights.keep_on_sleep,
        needed=lambda setup: setup.config.keep_on_sleep,
    ),
    Patch("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", drain.end_lost_requests),
    Patch("vllm.v1.core.sched.scheduler:Scheduler._preempt_request", preemption.unname_uncomputed),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished",
        drain.recompute_failed_requests,
        versions=(OLDEST, (0, 31)),
        needed=lambda setup: setup.config.on_load_failure == "recompute",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        _take_the_shortest_hit,
        versions=(OLDEST, (0, 27)),
        needed=lambda setup: setup.holds_state,
    ),
    Patch(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:"
        "MultiKVConnectorPromMetrics.observe",
        _observe_dictionaries,
        versions=(OLDEST, (0, 31)),
        needed=lambda setup: setup.is_member,
    ),
    EXECUTE_MODEL,
    LOAD_WEIGHTS,
)
