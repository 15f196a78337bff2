"""Checks that this machine can provide and page-lock the host memory of a configuration."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from kv_offload.config import ResolvedConfig, checks, trace_config
from kv_offload.config.host_memory import headroom_bytes, read_available_memory
from kv_offload.config.sizes import format_size
from kv_offload.errors import CapacityError, ConfigError, KVOffloadError
from kv_offload.tools.doctor.report import Check, judged, not_checked
from kv_offload.worker.capacity import check_available, describe_share
from kv_offload.worker.pool import check_pool_folder

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def read_configuration(file: str | None, replicas: int) -> tuple[Check, ResolvedConfig | None]:
    """Read a configuration as an engine does, and check that its size fits the machine."""
    name = "configuration"
    try:
        traced = trace_config({}, file=file, replicas=replicas)
        checks.check_sizes(traced)
    except KVOffloadError as error:
        fits = isinstance(error, CapacityError)
        needed = "a size that fits" if fits else "a file that kv-offload config accepts"
        return Check(name, "problem", error.message, needed), None
    found = f"{traced.file or 'the defaults'}; cpu_bytes is {format_size(traced.config.cpu_bytes)}"
    each = " for each replica" if replicas > 1 else ""
    unread = " ".join(traced.warnings)
    return judged(name, f"{found}{each}", "", unread, fits=not unread, otherwise="warning"), traced


def check_recording(traced: ResolvedConfig | None) -> Iterator[Check]:
    """Check that the engine could create the file of `record_trace`, if one is configured."""
    if traced is None or traced.config.record_trace is None:
        return
    path = Path(traced.config.record_trace)
    try:
        checks.check_recording(path)
    except ConfigError as error:
        yield Check("recording", "problem", error.message, "a file that this user may make")
    else:
        yield Check("recording", "ok", f"{path} can be made")


def check_memory(traced: ResolvedConfig | None, *, has_gpu: bool) -> Iterator[Check]:
    """Check a configuration against the memory limits; `None` stands for an unreadable one."""
    if traced is None:
        yield not_checked("free memory", "the configuration is wrong")
    else:
        headroom = format_size(headroom_bytes(traced.host))
        # A configuration that asks for too much memory was already refused when it was read.
        yield Check("memory", "ok", describe_share(traced), f"{headroom} left for everything else")
        yield check_free(traced)
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        yield check_lockable(traced, locked, has_gpu=has_gpu)
        if traced.config.host_pool is not None:
            yield check_pool(traced.config.host_pool_path)
    yield check_huge_pages()


def check_free(traced: ResolvedConfig) -> Check:
    """Compare the memory that the replicas take with the memory available now."""
    name = "free memory"
    try:
        free = read_available_memory()
    except CapacityError as error:  # without this figure an engine would not start either
        return Check(name, "problem", error.message)
    found = f"{format_size(free.size_bytes)} are available now ({free.source})"
    needed_bytes = traced.config.host_bytes * traced.replicas + headroom_bytes(traced.host)
    sizes = "cpu_bytes, remote.bytes" if traced.config.given_bytes else "cpu_bytes"
    needed = f"{format_size(needed_bytes)}: {sizes} and what must stay free"
    try:
        warning = check_available(traced, lambda mine: [mine])
    except CapacityError:
        remedy = (
            "Lower cpu_bytes, end what else takes memory, or give the process more. An engine that "
            "runs already holds its own."
        )
        return Check(name, "problem", found, needed, remedy)
    if needed_bytes > free.size_bytes:
        needed = f"{needed}, for {traced.replicas} replicas"
        warning = "The last replicas will not start, unless some run already."
    return judged(name, found, needed, warning or "", fits=warning is None, otherwise="warning")


def check_pool(path: str) -> Check:
    """Check that a folder can hold a host pool."""
    try:
        check_pool_folder(path)
    except ConfigError as error:
        return Check("host pool", "problem", error.message, "a folder in memory")
    return Check("host pool", "ok", f"{path} can have it")


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


def check_huge_pages(file: Path = HUGE_PAGES) -> Check:
    """Check that the pool gets huge pages, which are 512 times fewer to page-lock."""
    try:
        setting = file.read_text().strip()
    except OSError as error:
        return not_checked("huge pages", f"cannot be read: {error}")
    return judged(
        "huge pages",
        f"{file} is {setting}",
        "madvise or always",
        f"Page-locking takes longer. As root: echo madvise > {file}",
        fits="[never]" not in setting,
        otherwise="warning",
    )
