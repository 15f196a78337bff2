"""Finds what no reference leads to: vLLM's objects that call us, and our part inside of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kv_offload.messages import OffloadWorkerMetadata


def callers(name: str = "self") -> Iterator[Any]:
    """Yield what has this name in the caller and in its callers, the nearest first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get(name)
        frame = frame.f_back  # type: ignore[assignment]


def connectors_in(connector: Any, half: str = "offload_scheduler") -> Iterator[Any]:
    """Yield our connector if it has this half: the engine's own, or inside a MultiConnector."""
    if getattr(connector, half, None) is not None:
        yield connector
    for member in getattr(connector, "_connectors", ()):
        yield from connectors_in(member, half)


def connector_of(core: Any) -> Any | None:
    """Return our connector in vLLM's engine core; None without it, and while the core is built."""
    scheduler = getattr(core, "scheduler", None)
    return None if scheduler is None else next(connectors_in(scheduler.get_kv_connector()), None)


class EngineState:
    """Requests to pause or end that reached the engine while it is being built.

    Its scheduler, and its core if that is a process, are on the call stack.
    """

    def __init__(self) -> None:
        found = {id(caller): weakref.ref(caller) for caller in callers() if _is_of_core(caller)}
        self._parts = tuple(found.values())

    def is_to_rest(self) -> bool:
        """Return whether it pauses or ends."""
        return self._has("pause_state") or self.is_ending()

    def is_ending(self) -> bool:
        """Return whether it was asked to end, as by SIGTERM."""
        return self._has("shutdown_state")

    def _has(self, name: str) -> bool:
        return any(getattr(reference(), name, 0) for reference in self._parts)


def find_waker() -> Callable[[], None] | None:
    """Return what has the core of the engine that is being built look for work, if it waits.

    Any thread may call it. None for a core that is no process: its caller steps it.
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
    """Return whether it is vLLM's scheduler, whose state is not there yet, or its engine core."""
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.engine.core import EngineCore

    return isinstance(caller, (SchedulerInterface, EngineCore))


def worker_of_process() -> Any:
    """Return our worker in a rank's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return next(connectors_in(get_kv_transfer_group(), "offload_worker")).offload_worker


def connectors_with_reports(
    connector: Any, report: Any
) -> Iterator[tuple[Any, OffloadWorkerMetadata | None]]:
    """Yield our connector in vLLM's scheduler, with what its ranks report in a step's output.

    The report of a MultiConnector has a list with an entry for each member.
    """
    if getattr(connector, "offload_scheduler", None) is not None:
        yield connector, report if isinstance(report, OffloadWorkerMetadata) else None
    members = getattr(connector, "_connectors", ())
    parts = getattr(report, "metadata", None) or [None] * len(members)
    for member, part in zip(members, parts, strict=True):
        yield from connectors_with_reports(member, part)
