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


def schedulers_of(core: Any) -> list[Any]:
    """Return our schedulers in vLLM's engine core: none while it is built."""
    scheduler = getattr(core, "scheduler", None)
    connector = None if scheduler is None else scheduler.get_kv_connector()
    return list(halves(connector, "offload_scheduler"))


def workers_of_process() -> list[Any]:
    """Return our workers in this process, one for each connector of ours. Runs in a rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return list(halves(get_kv_transfer_group(), "offload_worker"))


def own_reports(connector: Any, report: Any) -> Iterator[tuple[Any, OffloadWorkerMetadata]]:
    """Yield our schedulers, each with what its ranks report, also inside a MultiConnector."""
    if isinstance(report, OffloadWorkerMetadata):
        yield connector.offload_scheduler, report
    else:
        members = getattr(connector, "_connectors", ())
        for member, part in zip(members, getattr(report, "metadata", ()), strict=False):
            yield from own_reports(member, part)


def failed_loads(connector: Any, output: Any) -> set[str]:
    """Return the requests whose loads a step's output reports as failed."""
    reports = own_reports(connector, output.kv_connector_worker_meta)
    return set().union(*(report.failed_loads for _, report in reports))


def requests_with_lost_kv(connector: Any, output: Any) -> set[str] | None:
    """Return the requests that have computed with KV that a step's output reports as lost.

    None if none was lost. Otherwise no block's name may be trusted, be there requests or not.
    """
    reports = own_reports(connector, output.kv_connector_worker_meta)
    lost = [half.lose(report) for half, report in reports]
    found = [requests for requests in lost if requests is not None]
    return set().union(*found) if found else None
