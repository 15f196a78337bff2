"""The disk below host memory: what it is, its space, and what it gives."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from kv_swap.errors import TierError
from kv_swap.tiers.probe import DiskRates, measure

from kv_offload.config import TracedConfig
from kv_offload.config.disk_folder import find_ranks, find_replicas
from kv_offload.config.sizes import format_size
from kv_offload.tools.doctor import BLOCK_BYTES, TOKEN_BYTES
from kv_offload.tools.doctor.report import Check, judged, not_checked

MEASURED_BYTES = 512 << 20
"""More than the cache of most disks takes at once; written in a second by a fast disk."""

UNFIT = {
    **dict.fromkeys(
        ("tmpfs", "ramfs"),
        "It is memory, which cpu_bytes uses better, and ends with the machine. Name a folder on a "
        "disk.",
    ),
    "overlay": "It is the container's own layer, and ends with the container. Mount a folder of "
    "the host's disk into the container, and name that.",
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p"),
        "Another machine has the disk, and the engine's copies wait for the network. Name a folder "
        "on a disk of this machine.",
    ),
}
"""By type of filesystem, why it is a bad place, and what to do."""


def check_disk(path: Path, traced: TracedConfig | None, *, measures: bool) -> Iterator[Check]:
    """Yield what the folder of a disk is, whether `disk_bytes` fit, and how fast it is."""
    name = "disk"
    if not measures:
        yield not_checked(name, f"{path}; --no-measure was given")
        return
    try:
        free_bytes = shutil.disk_usage(path).free
        rates = measure(path, min(MEASURED_BYTES, free_bytes // 2), BLOCK_BYTES)
    except (OSError, TierError) as error:
        needed = "a folder that this user may write, with some space"
        yield Check(name, "problem", f"{path}: {error}", needed, "Make it, or name another folder.")
        return
    remedy = UNFIT.get(rates.filesystem, "")
    found = f"{path} on {rates.filesystem}"
    yield judged(name, found, "a disk", remedy, fits=not remedy, otherwise="warning")
    yield from _check_space(path, rates, traced)
    yield _check_access(rates)
    tokens = rates.read_bytes_per_second / TOKEN_BYTES
    yield Check(
        "disk rate",
        "ok",
        f"{rates.write_bytes_per_second / 1e9:.2f} GB/s written, "
        f"{rates.read_bytes_per_second / 1e9:.2f} GB/s read: {tokens:,.0f} tokens/s of "
        f"{format_size(TOKEN_BYTES)} each",
    )


def _check_space(path: Path, rates: DiskRates, traced: TracedConfig | None) -> Iterator[Check]:
    """Compare what all replicas take with what is free, and what they have already."""
    name = "disk space"
    try:
        files = [file for folder in find_replicas(path) for file in find_ranks(folder).values()]
        taken_bytes = sum(file.stat().st_blocks * 512 for file in files)
    except OSError as error:  # a replica's folder is for the user of its engine alone
        yield not_checked(name, f"{error}", "Run doctor as the user that runs the engine.")
        return
    found = f"{format_size(rates.free_bytes)} are free"
    if taken_bytes:
        found += f", and files of kv-offload have {format_size(taken_bytes)}"
    if traced is None or traced.config.disk_bytes is None:
        yield Check(name, "ok", found)
        return
    needed_bytes = traced.config.disk_bytes * traced.replicas
    needed = f"{format_size(needed_bytes)} for disk_bytes"
    fits = needed_bytes <= rates.free_bytes + taken_bytes
    yield judged(name, found, needed, "Free space, or lower disk_bytes.", fits=fits)


def _check_access(rates: DiskRates) -> Check:
    found = "direct" if rates.direct else "through the kernel's page cache"
    remedy = (
        f"{rates.filesystem} does not allow direct access, so the kernel copies each block once "
        "more. ext4 and xfs allow it."
    )
    return judged("disk access", found, "direct", remedy, fits=rates.direct, otherwise="warning")
