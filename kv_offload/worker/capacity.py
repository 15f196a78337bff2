"""Checks that a replica's share of host memory is available when the replica starts.

`kv_offload.config` has checked that the shares of all replicas and a headroom fit the host. How
much of its share an earlier replica has taken cannot be seen, so each replica checks its own share
only. If the processes of a host want more than there is all the same, the pools stop growing
(`kv_swap.MemoryRoom`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kv_offload.config import ResolvedConfig, describe_bytes
from kv_offload.config.host_memory import headroom_bytes, read_available_memory
from kv_offload.config.sizes import format_size
from kv_offload.errors import CapacityError

logger = logging.getLogger(__name__)

LARGE_PART = 0.8
"""Share of the available memory; the start warns above it. A choice, not a measurement: the rest
is all that requests, page tables and other processes have to grow in."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def check_available(
    traced: ResolvedConfig, gather: Callable[[Any], list[Any]], kept_bytes: int = 0
) -> str | None:
    """Refuse a replica whose share and the headroom are more than is available on this host now.

    Of its share it has `kept_bytes` already, from a process before it. All ranks of the replica
    call it before any of them takes memory. `gather` returns what each gives, and waits for all.
    The share of a replica that spans hosts is divided by ranks. Returns a warning if the share is
    more than `LARGE_PART` of what is available. Raises `CapacityError`.
    """
    this_host = read_boot()
    reports = gather((this_host, read_available_memory()))
    here = [memory for host, memory in reports if host == this_host]
    least = min(here, key=lambda memory: memory.size_bytes)
    share_bytes = traced.config.host_bytes * len(here) // len(reports)
    headroom = headroom_bytes(traced.host)
    new_bytes = max(0, share_bytes - kept_bytes)
    if new_bytes + headroom > least.size_bytes:
        part = f", {describe_bytes(share_bytes)} of it here" if len(here) < len(reports) else ""
        raise CapacityError(
            f"{traced.describe_request()}{part}, but only {describe_bytes(least.size_bytes)} are "
            f"available now ({least.source}), of which {format_size(headroom)} must stay free. "
            f"Lower cpu_bytes, end what else takes memory, or give the process more."
        )
    part = new_bytes / least.size_bytes
    if part <= LARGE_PART:
        return None
    return (
        f"cpu_bytes takes {part:.0%} of the {format_size(least.size_bytes)} that are available now "
        f"({least.source}): lower it, unless nothing else here grows; else the kernel may end a "
        "process"
    )


def describe_share(traced: ResolvedConfig) -> str:
    """Return how much a replica takes, of what, and how many do so, for the log."""
    share_bytes, total = traced.config.host_bytes, traced.host
    percent = 100 * share_bytes / total.size_bytes
    text = (
        f"takes {format_size(share_bytes)}, {percent:.3g}% of the "
        f"{format_size(total.size_bytes)} that {total.source} says"
    )
    if traced.replicas == 1:
        return f"{text}; no other replica is seen here"
    all_bytes = format_size(share_bytes * traced.replicas)
    return f"{text}; the {traced.replicas} replicas here take {all_bytes}"


def warn_of_hidden_replicas(traced: ResolvedConfig) -> None:
    """Say that a percentage was not divided, because the number of replicas is not known."""
    written = traced.given["cpu_bytes"].written
    if "%" in written:
        logger.warning(
            "kv-offload: other data-parallel replicas on this host cannot be seen, so this one "
            "takes cpu_bytes %s alone. If there are others, divide it, or give each a size: 48GiB",
            written,
        )


def read_boot() -> str:
    """Return what distinguishes this host from others, also from inside a container."""
    try:
        return _BOOT.read_text()
    except OSError:
        return ""
