"""Every patch of vLLM: what it wraps, why, and what is lost without it. There is no other.

`docs/design/patches.md` shows the list. A wrapper calls the method that it found, so it works with
wrappers that other plugins set before or after. Each also works when set twice, which happens where
another plugin hides ours behind a wrapper without `functools.wraps`.
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

from kv_offload.engines.vllm import drain, weights
from kv_offload.engines.vllm.versions import NEWEST, OLDEST

if TYPE_CHECKING:
    from kv_offload.config import OffloadConfig

logger = logging.getLogger(__name__)

Method = Callable[..., Any]
Version = tuple[int, int]

MARK = "_kv_offload_patch"
"""Attribute of our wrappers: the target. `functools.wraps` of others' copies it to theirs."""

NOTED_REPLICAS = "_kv_offload_local_replicas"
"""Attribute of a `ParallelConfig`: replicas that its front end starts on this host."""


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
    where: Literal["process", "scheduler", "rank"]
    """Wrapped in every process, where a scheduler is built, or on one object of a rank."""
    make: Callable[[Method], Method]
    """Return the wrapper of the method that was found."""
    why: str
    without: str
    """What is lost without the patch."""
    until: str
    """When the patch can go."""
    versions: tuple[Version, Version] = (OLDEST, NEWEST)
    when: str = ""
    """What `needed` asks, in words; nothing where the patch is always needed."""
    needed: Callable[[Setup], bool] = lambda _setup: True


# -- installing --------------------------------------------------------------------------------

_unlogged: list[str] = []


def install_in_process() -> None:
    """Patch what every process needs that has loaded it; a second call replaces nothing."""
    for patch in PATCHES:
        if patch.where == "process" and patch.target.partition(":")[0] in sys.modules:
            _wrap_class(patch)


def install_for_scheduler(setup: Setup) -> None:
    """Patch what this engine and configuration need; a second call replaces nothing."""
    for patch in PATCHES:
        oldest, newest = patch.versions
        if patch.where == "scheduler" and oldest <= setup.version <= newest and patch.needed(setup):
            _wrap_class(patch)


def tell(patch: Patch, owner: Any, listener: Callable[..., None]) -> None:
    """Have a method of this one object call `listener` first, with the same arguments.

    A second call for the object wraps nothing: the wrapper calls both listeners.
    """
    name = patch.target.rpartition(".")[2]
    found = vars(owner).get(name)
    if getattr(found, MARK, None) != patch.target:
        found = _mark(patch, patch.make(found or _method_of_class(owner, name)))
        setattr(owner, name, found)
    found.listeners.append(listener)


def log_new() -> None:
    """Log which patches this process got since the last call."""
    if _unlogged:
        logger.info("kv-offload: patches of vLLM in this process: %s", ", ".join(_unlogged))
        _unlogged.clear()


def _wrap_class(patch: Patch) -> None:
    module, _, path = patch.target.partition(":")
    class_name, _, name = path.partition(".")
    owner = getattr(importlib.import_module(module), class_name, None)
    if patch.where == "process" and not hasattr(owner, name):
        return  # the plugin may not be in use here
    found = getattr(owner, name)
    if getattr(found, MARK, None) != patch.target:
        setattr(owner, name, _mark(patch, patch.make(found)))


def _mark(patch: Patch, wrapper: Method) -> Method:
    setattr(wrapper, MARK, patch.target)
    _unlogged.append(patch.target.rpartition(":")[2])
    return wrapper


def _method_of_class(owner: Any, name: str) -> Method:
    """Return what calls the method that the object's class has at the time of the call."""
    found = weakref.ref(owner)  # a cycle would keep its KV tensors until the next collection

    @functools.wraps(getattr(type(owner), name))
    def method(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        return getattr(type(alive), name)(alive, *args, **kwargs)

    return method


# -- wrappers ----------------------------------------------------------------------------------


def _create_engine_config(original: Method) -> Method:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        parallel = config.parallel_config
        setattr(parallel, NOTED_REPLICAS, int(parallel.data_parallel_size_local))
        return config

    return create_engine_config


def _schedule(original: Method) -> Method:
    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.has_mamba_layers = False  # read nowhere else once the scheduler has been built
        return original(self, *args, **kwargs)

    return schedule


def _observe(original: Method) -> Method:
    @functools.wraps(original)
    def observe(self: Any, transfer_stats_data: Any, engine_idx: int = 0) -> Any:
        as_sent = {
            name: stats if isinstance(stats, dict) else {"data": stats.data}
            for name, stats in transfer_stats_data.items()
        }
        return original(self, as_sent, engine_idx)

    return observe


def _tell_listeners(original: Method) -> Method:
    listeners: list[Callable[..., None]] = []

    @functools.wraps(original)
    def first(*args: Any, **kwargs: Any) -> Any:
        for listener in listeners:
            listener(*args, **kwargs)
        return original(*args, **kwargs)

    first.listeners = listeners  # type: ignore[attr-defined]
    return first


# -- the list ----------------------------------------------------------------------------------

EXECUTE_MODEL = Patch(
    "model runner.execute_model",
    "rank",
    _tell_listeners,
    "The connector's first hook comes just before the forward. A copy can start earlier.",
    "Stores and loads start some milliseconds later in every step, so the link idles meanwhile.",
    "vLLM calls a hook of the connector before it prepares a step.",
)
LOAD_WEIGHTS = Patch(
    "model.load_weights",
    "rank",
    _tell_listeners,
    "Trainers in the engine's process give the model weights without calling the engine core.",
    "Host memory serves KV of the old weights until somebody resets the connector.",
    "vLLM tells the connector of new weights.",
)
PATCHES = (
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "process",
        _create_engine_config,
        "Replicas of a dense model are told that they are alone: vLLM sets their sizes to 1. A "
        "note in the configuration travels to all processes.",
        "Each replica takes a percentage of `cpu_bytes` for itself alone, more than the host has.",
        "The configuration of a replica says how many run on its host.",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore.reset_prefix_cache",
        "scheduler",
        drain.resetting_after_drain,
        "A reset fails, or raises, while a copy holds a block, and vLLM asks no connector first. "
        "The wrapper asks the ranks for new weights, ends copies, resets, and tells the plugin.",
        "Reset, sleep and pause fail while stores or loads run; new weights are noticed too late.",
        "vLLM has a hook that drains connectors before it resets.",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore.collective_rpc",
        "scheduler",
        weights.watched_rpc,
        "Calls on the workers may change weights.",
        "Host memory serves KV of the old weights until somebody resets the connector.",
        "vLLM tells the connector of new weights.",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore.sleep",
        "scheduler",
        weights.watched_sleep,
        "vLLM resets connectors for a sleep of level 1, which changes no weight, as for others.",
        "`keep_on_sleep` does nothing: each sleep empties host memory.",
        "vLLM tells the connector why it resets.",
        when="with `keep_on_sleep`",
        needed=lambda setup: setup.config.keep_on_sleep,
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "scheduler",
        drain.ending_lost_requests,
        "A forward may have read KV that a load did not bring. vLLM has no right way to go on from "
        "there under asynchronous scheduling, so such requests must end before it reads tokens.",
        "A request whose load failed twice gets wrong tokens, or the engine ends.",
        "vLLM recomputes a running request correctly under asynchronous scheduling.",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished",
        "scheduler",
        drain.recomputing_failed_requests,
        "These versions can only be told of failed blocks, and end the engine if the model has "
        "several cache groups.",
        "A failed load of a hybrid model ends the engine.",
        "The oldest supported version is 0.32.",
        versions=(OLDEST, (0, 31)),
        when="with `on_load_failure: recompute`",
        needed=lambda setup: setup.config.on_load_failure == "recompute",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "scheduler",
        _schedule,
        "With states vLLM takes the longest local hit of any cache group, for connectors that "
        "always bring the state. Ours may not have it.",
        "A hybrid model computes on states that are not there: wrong tokens.",
        "The oldest supported version is 0.28.",
        versions=(OLDEST, (0, 27)),
        when="for models with states",
        needed=lambda setup: setup.holds_state,
    ),
    Patch(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:"
        "MultiKVConnectorPromMetrics.observe",
        "scheduler",
        _observe,
        "In one process members' figures arrive as objects, which vLLM indexes as dictionaries.",
        "The first figures of an engine in the user's process raise.",
        "The oldest supported version is 0.32.",
        versions=(OLDEST, (0, 31)),
        when="inside a MultiConnector",
        needed=lambda setup: setup.is_member,
    ),
    EXECUTE_MODEL,
    LOAD_WEIGHTS,
)
"""Every patch."""
