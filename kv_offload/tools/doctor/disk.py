"""Checks the disk below host memory: its filesystem, space and speed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from kv_swap.errors import TierError
from kv_swap.tiers.probe import DiskRates, find_filesystem, measure

from kv_offload.config import ResolvedConfig
from kv_offload.config.checks import find_place, read_room
from kv_offload.config.sizes import format_size
from kv_offload.errors import ConfigError
from kv_offload.tools.doctor import BLOCK_BYTES, TOKEN_BYTES
from kv_offload.tools.doctor.report import Check, judged, not_checked

MEASURED_BYTES = 512 << 20
"""More than most disks' write caches hold; a fast disk writes it in a second."""

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
"""Unsuitable filesystem types, each with the reason and the remedy."""


def check_disk(path: Path, traced: ResolvedConfig, *, measures: bool) -> Iterator[Check]:
    """Check the folder of a disk: its filesystem, room for `disk.bytes`, and its speed."""
    name = "disk"
    try:
        place = find_place(path)
    except ConfigError as error:
        yield Check(name, "problem", error.message, "a folder that this user may write")
        return
    filesystem = find_filesystem(place)
    remedy = UNFIT.get(filesystem, "")
    found = f"{path} on {filesystem}" + ("" if place == path else "; an engine makes the folder")
    yield judged(name, found, "a disk", remedy, fits=not remedy, otherwise="warning")
    yield _check_space(path, traced)
    if not measures:
        yield not_checked("disk rate", "--no-measure was given")
        return
    try:
        free_bytes = shutil.disk_usage(place).free
        rates = measure(place, min(MEASURED_BYTES, free_bytes // 2), BLOCK_BYTES)
    except (OSError, TierError) as error:
        needed, remedy = "some space, and a disk without errors", "Name another folder."
        yield Check("disk rate", "problem", str(error), needed, remedy)
        return
    yield _check_access(rates, filesystem)
    tokens = rates.read_bytes_per_second / TOKEN_BYTES
    yield Check(
        "disk rate",
        "ok",
        f"{rates.write_bytes_per_second / 1e9:.2f} GB/s written, "
        f"{rates.read_bytes_per_second / 1e9:.2f} GB/s read: {tokens:,.0f} tokens/s of "
        f"{format_size(TOKEN_BYTES)} each",
    )


def _check_space(path: Path, traced: ResolvedConfig) -> Check:
    """Compare the space that all replicas need with the free space plus their existing files."""
    name = "disk space"
    try:
        room = read_room(path)
    except OSError as error:  # a replica's folder is private to the engine's user
        return not_checked(name, f"{error}", "Run doctor as the user that runs the engine.")
    found = f"{format_size(room.free_bytes)} are free"
    if room.taken_bytes:
        found += f", and files of kv-offload have {format_size(room.taken_bytes)}"
    if traced.config.disk is None:
        return Check(name, "ok", found)
    needed_bytes = traced.config.disk.bytes * traced.replicas
    needed = f"{format_size(needed_bytes)} for disk.bytes"
    remedy = "Free space, or lower disk.bytes."
    return judged(name, found, needed, remedy, fits=room.fits(needed_bytes))


def _check_access(rates: DiskRates, filesystem: str) -> Check:
    found = "direct" if rates.direct else "through the kernel's page cache"
    remedy = (
        f"{filesystem} does not allow direct access, so the kernel copies each block once "
        "more. ext4 and xfs allow it."
    )
    return judged("disk access", found, "direct", remedy, fits=rates.direct, otherwise="warning")
