"""Filesystems that a test mounts, which root can, and what writes are refused."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest


@contextlib.contextmanager
def _mounted(folder: Path, *how: str | Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *how, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a filesystem, which root can: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def in_memory(folder: Path, size: int | str) -> AbstractContextManager[Path]:
    """Mount a filesystem of this size, in bytes or as `4m`."""
    return _mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def on_a_file(folder: Path, image: Path) -> AbstractContextManager[Path]:
    """Mount a filesystem of 32 MiB on a disk that is a file."""
    with image.open("wb") as file:
        file.truncate(32 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, env={"PATH": "/usr/sbin:/sbin"})
    except FileNotFoundError:
        pytest.skip("cannot make a filesystem: there is no mkfs.ext4")
    return _mounted(folder, "-o", "loop", image)


@contextlib.contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process can be written behind its first `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
