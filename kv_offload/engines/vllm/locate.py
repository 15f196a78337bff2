"""Finds objects that vLLM does not pass: the plugin's callers, and our connector in vLLM."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kv_offload.messages import OffloadWorkerMetadata


def callers(name: str = "self") -> Iterator[Any]:
    """Yield the local variable `name` of each frame on the call stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get(name)
        frame = frame.f_back  # type: ignore[assignment]


def connectors_in(connector: Any, half: str = "offload_scheduler") -> Iterator[Any]:
    """Yield our connectors with this half: `connector` itself, or members of a MultiConnector."""
    if getattr(connector, half, None) is not None:
        yield connector
    for member in getattr(connector, "_connectors", ()):
        yield from connectors_in(member, half)


def connector_of(core: Any) -> Any | None:
    """Return our connector in vLLM's engine core; None if there is none, or none yet."""
    scheduler = getattr(core, "scheduler", None)
    return None if scheduler is None else next(connectors_in(scheduler.get_kv_connector()), None)


class EngineState:
    """Says whether the engine was asked to pause or end, even while it is being built.

    Must be created while the engine's scheduler, and its core if that is a process, are on the call
    stack.
    """

    def __init__(self) -> None:
        found = {id(caller): weakref.ref(caller) for caller in callers() if _is_of_core(caller)}
        self._parts = tuple(found.values())

    def is_to_rest(self) -> bool:
        """Return whether the engine was asked to pause or end."""
        return self._has("pause_state") or self.is_ending()

    def is_ending(self) -> bool:
        """Return whether the engine was asked to end, for example by SIGTERM."""
        return self._has("shutdown_state")

    def _has(self, name: str) -> bool:
        return any(getattr(reference(), name, 0) for reference in self._parts)


def find_waker() -> Callable[[], None] | None:
    """Return a thread-safe function that wakes up the core of the engine that is being built.

    None if the core does not run in a separate process: then its user calls each step.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    found = next((caller for caller in callers() if isinstance(caller, EngineCoreProc)), None)
    if found is None:
        return None
    reference = weakref.ref(found)

    def wake() -> None:
        if (core := reference()) is not None:
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    return wake


def _is_of_core(caller: Any) -> bool:
    """Return whether this is vLLM's engine core, or its scheduler, whose state is not set yet."""
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.engine.core import EngineCore

    return isinstance(caller, (SchedulerInterface, EngineCore))


def worker_of_process() -> Any:
    """Return our worker in a rank's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return next(connectors_in(get_kv_transfer_group(), "offload_worker")).offload_worker


def call_ranks(core: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of our worker on every rank; return the answers in rank order. Blocks."""
    answers: list[Any] = core.model_executor.collective_rpc(_call_worker, args=(method, *args))
    return answers


def _call_worker(_worker: Any, method: str, *args: Any) -> Any:
    return getattr(worker_of_process(), method)(*args)


def connectors_with_reports(
    connector: Any, report: Any
) -> Iterator[tuple[Any, OffloadWorkerMetadata | None]]:
    """Yield our connectors in vLLM's scheduler, each with its ranks' report for a step.

    A MultiConnector's report has one entry per member.
    """
    if getattr(connector, "offload_scheduler", None) is not None:
        yield connector, report if isinstance(report, OffloadWorkerMetadata) else None
    members = getattr(connector, "_connectors", ())
    parts = getattr(report, "metadata", None) or [None] * len(members)
    for member, part in zip(members, parts, strict=True):
        yield from connectors_with_reports(member, part)
