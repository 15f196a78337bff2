"""Checks that a replica's share of host memory is available when the replica starts.

`kv_offload.config` has checked that the shares of all replicas and a headroom fit the host. A
replica cannot see how much of its share an earlier replica has already taken, so it checks only its
own share. If the processes of a host still want more than there is, the pools stop growing
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
"""Share of the available memory above which startup warns. This is a choice, not a measurement: the
rest is all the room that requests, page tables and other processes have to grow."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def check_available(
    traced: ResolvedConfig,
    gather: Callable[[Any], list[Any]],
    kept_bytes: int = 0,
    wait: Callable[[str], bool] | None = None,
) -> str | None:
    """Refuse a replica if its share and the headroom exceed the memory available on this host now.

    `kept_bytes` of the share are already taken, kept from an earlier process. All ranks of the
    replica must call this before any of them takes memory. `gather` collects a value from every
    rank, and waits for all. The share of a replica that spans hosts is divided by ranks. `wait`
    gets a description of what is lacking; while it returns True on any rank, memory may become
    available. Returns a warning if the share is more than `LARGE_PART` of the available memory.
    Raises `CapacityError`.
    """
    this_host, may_wait = read_boot(), wait is not None
    while True:
        # Every rank must come to the same answer, or some would wait for the others' next report.
        own = headroom_bytes(traced.host)
        reports = gather((this_host, read_available_memory(), own))
        here = [(memory, free) for host, memory, free in reports if host == this_host]
        least = min((memory for memory, _ in here), key=lambda memory: memory.size_bytes)
        headroom = max(free for _, free in here)
        share_bytes = traced.config.host_bytes * len(here) // len(reports)
        new_bytes = max(0, share_bytes - kept_bytes)
        if new_bytes + headroom <= least.size_bytes:
            break
        part = f", {describe_bytes(share_bytes)} of it here" if len(here) < len(reports) else ""
        lack = (
            f"{traced.describe_request()}{part}, but only {describe_bytes(least.size_bytes)} are "
            f"available now ({least.source}), of which {format_size(headroom)} must stay free"
        )
        # Ranks of other hosts may have enough, and not ask again.
        if wait is None or not may_wait or len(here) < len(reports):
            raise CapacityError(
                f"{lack}. Lower cpu_bytes, stop other programs, or give this one more memory."
            )
        try:
            waited = wait(lack)
        except OSError:  # the folder was removed
            waited = False
        may_wait = any(gather(waited))
    part = new_bytes / least.size_bytes
    if part <= LARGE_PART:
        return None
    return (
        f"cpu_bytes takes {part:.0%} of the {format_size(least.size_bytes)} that are available now "
        f"({least.source}): lower it unless nothing else on this machine will grow; otherwise the "
        "kernel may kill a process"
    )


def describe_share(traced: ResolvedConfig) -> str:
    """Describe for the log the replica's share of memory, and the number of replicas."""
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
    """Warn that a percentage was not divided, because the number of replicas is unknown."""
    written = traced.given["cpu_bytes"].written
    if "%" in written:
        logger.warning(
            "kv-offload: other data-parallel replicas on this host cannot be seen, so this one "
            "takes cpu_bytes %s alone. If there are others, divide it, or give each a size: 48GiB",
            written,
        )


def read_boot() -> str:
    """Return an identifier of this host that is the same inside containers."""
    try:
        return _BOOT.read_text()
    except OSError:
        return ""
