"""A child that a process forks without another program keeps nothing that its engine has locked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache.directory import DIRECTORY, Directory
from kv_offload.cache.disk_index import DiskIndex
from kv_offload.cache.peers import PeerDirectories
from kv_offload.cache.seats import READER, lock_file
from kv_offload.worker import pool
from kv_offload.worker.pool import Pool
from tests.support.children import living_child
from tests.support.tier_bed import TierBed

FILES = {0: "rank-0.kind.token"}


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[None]:
    with TierBed(folder / "file"):
        yield


@contextlib.contextmanager
def disk_index(folder: Path) -> Iterator[None]:
    index = DiskIndex(folder / "index", {}, {"0": "a1"}, 4)
    yield
    index.close(60)
    assert not index._writer.is_alive()


@contextlib.contextmanager
def seat(folder: Path) -> Iterator[None]:
    taken = Pool(folder / "user" / "chat", {}).take_seat(0, lambda value: [value])
    assert taken.folder.name == "seat-0"
    yield
    taken.leave()


@contextlib.contextmanager
def directory(folder: Path) -> Iterator[None]:
    first = not (folder / DIRECTORY).exists()
    opened = Directory(folder, FILES, 4)
    assert opened.is_continued is not first
    opened.publish(np.array([2], np.int32), [b"key"])
    yield
    assert opened.read(0, 4)[1] == [b"key"]
    opened.close()


@contextlib.contextmanager
def leases(folder: Path) -> Iterator[None]:
    own = folder / "seat-0"
    own.mkdir(exist_ok=True)
    peers = PeerDirectories({0: own / FILES[0]})
    assert lock_file(own / READER) is None
    yield
    peers.close()
    lock = lock_file(own / READER)
    assert lock is not None
    os.close(lock)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("opened", [disk, disk_index, seat, directory, leases])
def test_the_next_engine_finds_all_free_while_a_child_lives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: Callable[[Path], contextlib.AbstractContextManager[None]],
) -> None:
    monkeypatch.setattr(pool, "LOCK_SECONDS", 0.0)
    with contextlib.ExitStack() as child:
        with opened(tmp_path):
            child.enter_context(living_child())
        with opened(tmp_path):
            pass
