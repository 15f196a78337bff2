"""Finds the plugin's two halves inside vLLM's objects, and what ranks reported to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kv_offload.messages import OffloadWorkerMetadata


def connectors_in(connector: Any, half: str = "offload_scheduler") -> Iterator[Any]:
    """Yield our connectors that have this half: the engine's own, or inside a MultiConnector."""
    if getattr(connector, half, None) is not None:
        yield connector
    for member in getattr(connector, "_connectors", ()):
        yield from connectors_in(member, half)


def connectors_of(core: Any) -> list[Any]:
    """Return our connectors in vLLM's engine core: none while it is built."""
    scheduler = getattr(core, "scheduler", None)
    return [] if scheduler is None else list(connectors_in(scheduler.get_kv_connector()))


def schedulers_of(core: Any) -> list[Any]:
    """Return our schedulers in vLLM's engine core: none while it is built."""
    return [connector.offload_scheduler for connector in connectors_of(core)]


def workers_of_process() -> list[Any]:
    """Return our workers in this process, one for each connector of ours. Runs in a rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found = connectors_in(get_kv_transfer_group(), "offload_worker")
    return [connector.offload_worker for connector in found]


def connectors_with_reports(
    connector: Any, output: Any
) -> Iterator[tuple[Any, OffloadWorkerMetadata | None]]:
    """Yield our connectors in vLLM's scheduler, each with what its ranks report in a step's output.

    Inside a MultiConnector the output has a list with an entry for each member.
    """
    return _with_reports(connector, getattr(output, "kv_connector_worker_meta", None))


def _with_reports(
    connector: Any, report: Any
) -> Iterator[tuple[Any, OffloadWorkerMetadata | None]]:
    if getattr(connector, "offload_scheduler", None) is not None:
        yield connector, report if isinstance(report, OffloadWorkerMetadata) else None
    members = getattr(connector, "_connectors", ())
    parts = getattr(report, "metadata", None) or [None] * len(members)
    for member, part in zip(members, parts, strict=True):
        yield from _with_reports(member, part)
