"""Finds the plugin's two halves inside vLLM's objects, and what ranks reported to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kv_offload.messages import OffloadWorkerMetadata


def halves(connector: Any, attribute: str) -> Iterator[Any]:
    """Yield an attribute of our connectors: the engine's own, or those inside a MultiConnector."""
    half = getattr(connector, attribute, None)
    if half is not None:
        yield half
    for member in getattr(connector, "_connectors", ()):
        yield from halves(member, attribute)


def schedulers_in(connector: Any) -> Iterator[Any]:
    """Yield our schedulers inside a connector of vLLM's scheduler."""
    return halves(connector, "offload_scheduler")


def schedulers_of(core: Any) -> list[Any]:
    """Return our schedulers in vLLM's engine core: none while it is built."""
    scheduler = getattr(core, "scheduler", None)
    return [] if scheduler is None else list(schedulers_in(scheduler.get_kv_connector()))


def workers_of_process() -> list[Any]:
    """Return our workers in this process, one for each connector of ours. Runs in a rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return list(halves(get_kv_transfer_group(), "offload_worker"))


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
