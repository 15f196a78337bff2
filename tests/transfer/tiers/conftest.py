"""Threads that must end, calls that can be held, and filesystems of a test's own."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.filesystems import in_memory, on_a_file
from tests.support.tier_bed import TierBed, named


def tier_threads() -> list[threading.Thread]:
    names = ("kv-swap-promote", "kv-swap-demote", "kv-swap-connect", "kv-swap-sweep")
    return [thread for thread in threading.enumerate() if thread.name in names]


@pytest.fixture(autouse=True)
def no_thread_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    before = set(tier_threads())  # a test that failed keeps its tier as long as its traceback
    yield
    if request.session.testsfailed > failed:
        return  # what failed holds its tier, whose threads would be waited for in vain
    gc.collect()
    for thread in set(tier_threads()) - before:
        thread.join(60)
    assert not set(tier_threads()) - before


class Gate:
    """Stands in for a call of `os`: holds every thread that comes, until it is opened."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, *arguments: Any) -> int:
        self.reached.release()
        assert self.opened.wait(60)
        return self._call(*arguments)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every read of a record: no real disk hangs when it is asked to."""
    gate = Gate(os.preadv)
    monkeypatch.setattr(os, "preadv", gate)
    yield gate
    gate.opened.set()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Every write of a record, open until a test closes it: a new file is written to."""
    gate = Gate(os.pwritev)
    gate.opened.set()
    monkeypatch.setattr(os, "pwritev", gate)
    return gate


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    with in_memory(tmp_path / "a small one", "4m") as folder:
        yield folder


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A filesystem on a disk that is a file: whoever cuts the file has bad sectors."""
    disk = tmp_path / "disk"
    with on_a_file(tmp_path / "failing", disk) as folder:
        yield folder, disk


@pytest.fixture
def bad_sectors(failing: tuple[Path, Path]) -> tuple[TierBed, Callable[[], None]]:
    """A tier of 256 blocks on such a disk, and what takes away the half of its sectors."""
    folder, disk = failing
    bed = TierBed(folder / "file", 256, slot_bytes=65536 - 4096)
    assert bed.put(named(256)).failed == ()

    def lose() -> None:
        os.sync()
        os.truncate(disk, 16 << 20)

    return bed, lose


@pytest.fixture
def read_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each read of records asked for, since the list was cleared."""
    calls: list[int] = []
    preadv = os.preadv

    def read(fd: int, buffers: Sequence[memoryview], *rest: int) -> int:
        calls.append(sum(map(len, buffers)))
        return preadv(fd, buffers, *rest)

    monkeypatch.setattr(os, "preadv", read)
    return calls
