"""The files of a replica's ranks in its folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from kv_swap import KVLayout, TensorDescription, create_engine

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.config.disk_folder import INDEX_FILE
from kv_offload.worker.disk import Disk
from kv_offload.worker.sharing import ALONE
from tests.support.filesystems import in_memory
from tests.support.waiting import LIMIT_SECONDS

NUM_RANKS = 4
DISK_BYTES = 8 << 20


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path / "tight", DISK_BYTES + (1 << 20)) as folder:
        yield folder


def open_all(folder: Path, num_ranks: int, late: Sequence[int] = ()) -> None:
    """Open and close the files of an engine, each on a thread, as ranks that start together do."""
    assert refusals(folder, num_ranks, late) == []


def refusals(folder: Path, num_ranks: int, late: Sequence[int] = ()) -> list[str]:
    """Open and close the files of an engine, and return the errors of its ranks."""
    kv = torch.zeros((4, 4096), dtype=torch.uint8)
    layout = KVLayout.from_tensors(len(kv), [TensorDescription.of("kv", kv, len(kv))])
    disk = Disk(folder, DISK_BYTES, {"model": "a"})
    errors: list[str] = []

    def open_one(rank: int) -> None:
        if rank in late:
            time.sleep(0.5)
        try:
            with create_engine("host", layout, num_slots=4, keep_alive=[kv]) as engine:
                disk.open(rank, num_ranks, ALONE, "pages", engine).close()
        except Exception as error:  # noqa: BLE001 - the test fails with it
            errors.append(str(error))

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def taken_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_engine_with_fewer_ranks_takes_no_more_than_its_bytes(tmp_path, caplog):
    caplog.set_level("INFO")
    open_all(tmp_path, NUM_RANKS)
    open_all(tmp_path, 2)
    assert names(tmp_path) == ["rank-0.kv", "rank-1.kv"]
    assert taken_bytes(tmp_path) <= DISK_BYTES
    assert caplog.text.count("of an engine with more ranks was removed, which had 2") == 2


def test_what_is_none_of_ours_is_left_and_told_of(tmp_path, caplog):
    open_all(tmp_path, NUM_RANKS)
    (tmp_path / "rank-2.kv").write_bytes(b"somebody's")
    (tmp_path / "rank-4.txt").write_bytes(b"somebody's")
    open_all(tmp_path, 1)
    assert (tmp_path / "rank-2.kv").read_bytes() == b"somebody's"
    assert names(tmp_path) == ["rank-0.kv", "rank-2.kv", "rank-4.txt"]
    assert "no tier has made it" in caplog.text


def test_in_the_folder_of_a_running_engine_with_fewer_ranks_no_file_is_made(tmp_path):
    """It would stay there, with all its space reserved: only the rank of the other is locked."""
    open_all(tmp_path, 1)
    running = DiskIndex(tmp_path / INDEX_FILE, {"model": "a"}, {"0": "a1"}, 8)
    before = names(tmp_path)
    assert before == ["index.sqlite", "index.sqlite-wal", "index.sqlite.lock", "rank-0.kv"]
    said = refusals(tmp_path, 2)
    assert [f"{INDEX_FILE}: another engine uses it" in one for one in said] == [True, True]
    assert names(tmp_path) == before
    running.close(LIMIT_SECONDS)
    open_all(tmp_path, 2)
    assert {"rank-0.kv", "rank-1.kv"} < set(names(tmp_path))


@pytest.mark.parametrize(("before", "after", "late"), [(2, 4, (0, 1)), (4, 2, ()), (2, 1, ())])
def test_ranks_that_divide_a_disk_anew_need_no_more_room_than_before(
    tight, monkeypatch, before, after, late
):
    """Some of them need what others give back, be these earlier or later."""
    monkeypatch.setattr("kv_swap.tiers.file._SPACE_SECONDS", 60)
    open_all(tight, before)
    open_all(tight, after, late)
    assert len(names(tight)) == after
