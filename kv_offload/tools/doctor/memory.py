"""Checks that this machine can provide and page-lock the host memory of a configuration."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import partial

from kv_offload.config import ResolvedConfig
from kv_offload.config.host_memory import headroom_bytes, read_available_memory
from kv_offload.config.sizes import format_size
from kv_offload.errors import CapacityError
from kv_offload.tools.doctor.report import Check, accepted, judged
from kv_offload.worker.capacity import check_available, describe_share
from kv_offload.worker.pool import check_pool_folder


def check_memory(traced: ResolvedConfig, *, has_gpu: bool) -> Iterator[Check]:
    """Check a configuration that was read without errors against the memory limits."""
    found = f"{traced.file or 'the defaults'}; cpu_bytes is {format_size(traced.config.cpu_bytes)}"
    each = " for each replica" if traced.replicas > 1 else ""
    unread = " ".join(traced.warnings)
    yield judged(
        "configuration", f"{found}{each}", "", unread, fits=not unread, otherwise="warning"
    )
    headroom = format_size(headroom_bytes(traced.host))
    # Reading a configuration already refuses too much memory.
    yield Check("memory", "ok", describe_share(traced), f"{headroom} left for everything else")
    yield check_free(traced)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield check_lockable(traced, locked, has_gpu=has_gpu)
    if traced.config.host_pool is not None:
        path = traced.config.host_pool_path
        yield accepted("host pool", f"{path} can have it", partial(check_pool_folder, path))


def check_free(traced: ResolvedConfig) -> Check:
    """Compare the memory that the replicas take with the memory available now."""
    name = "free memory"
    try:
        free = read_available_memory()
    except CapacityError as error:  # an engine would not start without this figure, either
        return Check(name, "problem", error.message)
    found = f"{format_size(free.size_bytes)} are available now ({free.source})"
    needed_bytes = traced.config.host_bytes * traced.replicas + headroom_bytes(traced.host)
    sizes = "cpu_bytes, remote.bytes" if traced.config.given_bytes else "cpu_bytes"
    needed = f"{format_size(needed_bytes)}: {sizes} and what must stay free"
    try:
        warning = check_available(traced, lambda mine: [mine])
    except CapacityError:
        remedy = (
            "Lower cpu_bytes, stop other programs, or give this one more memory. A running engine "
            "already holds its own."
        )
        return Check(name, "problem", found, needed, remedy)
    if needed_bytes > free.size_bytes:
        needed = f"{needed}, for {traced.replicas} replicas"
        warning = "The last replicas will not start, unless some run already."
    return judged(name, found, needed, warning or "", fits=warning is None, otherwise="warning")


def check_lockable(traced: ResolvedConfig, limit_bytes: int, *, has_gpu: bool) -> Check:
    """Compare `ulimit -l` with the memory that one engine page-locks."""
    name, size_bytes = "lockable memory", traced.config.cpu_bytes
    unlimited = limit_bytes == resource.RLIM_INFINITY
    found = f"ulimit -l is {'unlimited' if unlimited else format_size(limit_bytes)}"
    fits = unlimited or limit_bytes >= size_bytes
    if not fits and not has_gpu:
        return Check(name, "ok", f"{found}; without a GPU nothing is locked")
    remedy = (
        "Not every driver counts what CUDA locks. If the engine says `cannot page-lock`, raise it: "
        "ulimit -l unlimited, --ulimit memlock=-1 for a container, LimitMEMLOCK=infinity for a "
        "systemd unit."
    )
    needed = f"{format_size(size_bytes)} or unlimited"
    return judged(name, found, needed, remedy, fits=fits, otherwise="warning")
