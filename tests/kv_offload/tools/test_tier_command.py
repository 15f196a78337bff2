"""What `kv-offload tier` says of folders that engines' own classes have filled."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from kv_swap.tiers.region import read_description
from msgspec import structs

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.config.disk_folder import INDEX_FILE, rank_file, replica_folder
from tests.kv_offload.tools.conftest import Command
from tests.support.tier_bed import TierBed

Run: TypeAlias = Callable[..., Any]
NUM_SLOTS, SLOT_BYTES = 8, 16384
MODEL = {"model": "org/model-8b", "dtype": "torch.bfloat16", "vllm": "0.32.0"}


class Disk:
    """The index and the ranks of one replica, open as an engine has them."""

    def __init__(self, folder: Path, ranks: int = 2, description: Any = MODEL) -> None:
        folder.mkdir(exist_ok=True)
        self.ranks = [TierBed(rank_file(folder, rank), NUM_SLOTS) for rank in range(ranks)]
        files = {str(rank): bed.tier.file_id for rank, bed in enumerate(self.ranks)}
        self.index = DiskIndex(folder / INDEX_FILE, description, files, NUM_SLOTS)

    def put(self, *slots: int) -> None:
        keys = [b"key %d" % slot for slot in slots]
        names = {s: self.index.generation + k for s, k in zip(slots, keys, strict=True)}
        for bed in self.ranks:
            assert bed.put(names).failed == ()
        self.index.put(keys, np.array(slots, np.int32))

    def close(self) -> None:
        self.index.close(20)
        for bed in self.ranks:
            bed.tier.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A disk on which five of eight slots hold a block, of two ranks; no engine uses it."""
    disk = Disk(tmp_path / "kv")
    disk.put(1, 2, 5, 6, 7)
    disk.close()
    return tmp_path / "kv"


@pytest.fixture
def shown(command: Command) -> Run:
    def run(*words: Any, status: int = 0) -> str:
        done = command("tier", *words)
        assert done.status == status
        return done.out

    return run


@pytest.fixture
def as_json(shown: Run) -> Run:
    return lambda *words, status=0: json.loads(shown(*words, "--json", status=status))


def test_a_disk_is_shown(folder, shown, as_json):
    text = shown(folder)
    assert re.sub(
        r"\d+ s ago", "0 s ago", re.sub(r"[\d.]+ KiB in rank", "N KiB in rank", text)
    ) == (
        f"{folder}\n"
        "  in use    by no engine\n"
        "  model     org/model-8b, torch.bfloat16\n"
        "  slots     5 of 8 hold a block, 62.5 %\n"
        "  data      160 KiB in 2 files\n"
        "  last use  0 s ago; that of the next to go 0 s ago\n"
        "  rank 0    N KiB in rank-0.kv, slots of 16 KiB\n"
        "  rank 1    N KiB in rank-1.kv, slots of 16 KiB\n"
    )
    (found,) = as_json(folder)
    assert found["description"] == MODEL
    assert (found["slots"], found["used_slots"], found["used_bytes"]) == (8, 5, 2 * 5 * SLOT_BYTES)
    assert (found["in_use"], found["was_reset"], found["problem"]) == (False, False, "")
    assert 0 < found["first_use"] < found["last_use"]
    assert [rank["belongs_to_index"] for rank in found["ranks"]] == [True, True]
    assert all(rank["file_bytes"] >= NUM_SLOTS * SLOT_BYTES for rank in found["ranks"])


def test_an_engine_goes_on_meanwhile(tmp_path, shown, as_json):
    disk = Disk(tmp_path, ranks=1)
    disk.put(1, 2)
    (found,) = as_json(tmp_path)
    assert found["in_use"]
    assert "in use  by an engine\n" in shown(tmp_path)
    disk.close()
    (found,) = as_json(tmp_path)
    assert not found["in_use"]


def test_what_a_reset_leaves_is_said(tmp_path, shown):
    disk = Disk(tmp_path, ranks=1)
    disk.put(1)
    disk.index.clear()
    disk.close()
    text = shown(tmp_path)
    assert "index   none: a reset or new weights emptied the disk, or it was removed" in text


def test_replicas_have_folders_of_their_own(tmp_path, shown, as_json):
    for replica in (0, 2, 10):
        disk = Disk(replica_folder(tmp_path, replica), ranks=1)
        disk.put(*range(replica % 8 + 1))
        disk.close()
    (tmp_path / "replica-of-mine").mkdir()
    found = as_json(tmp_path)
    folders = [str(replica_folder(tmp_path, replica)) for replica in (0, 2, 10)]
    assert [one["folder"] for one in found] == folders
    assert [one["used_slots"] for one in found] == [1, 3, 3]
    assert shown(tmp_path).count("in use") == 3


def test_what_is_wrong_with_a_file_is_said(folder, shown):
    rank_file(folder, 0).write_bytes(b"mine")
    rank_file(folder, 1).unlink()
    with TierBed(rank_file(folder, 1), NUM_SLOTS - 3):
        pass  # begun afresh, as by an engine with another disk.bytes, which was killed then
    text = shown(folder, status=1)
    assert "rank 0  " in text
    assert "no tier has made it" in text
    assert "not the file that the index is of: nothing in it is found" in text
    (folder / INDEX_FILE).write_bytes(b"no database at all")
    text = shown(folder, status=1)
    assert f"index   {folder / INDEX_FILE}: cannot be used: file is not a database." in text
    (folder / INDEX_FILE).unlink()
    assert "index   none: a reset or new weights emptied the disk" in shown(folder, status=1)


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(folder, shown):
    rank_file(folder, 0).unlink()
    os.mkfifo(rank_file(folder, 0))
    assert f"{rank_file(folder, 0)}: it is not a regular file" in shown(folder, status=1)


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("suffix", [".lock", "-wal", "-journal"])
def test_a_pipe_beside_the_index_is_named_and_not_waited_for(folder, shown, suffix, has_index):
    pipe = folder / f"{INDEX_FILE}{suffix}"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    if not has_index:
        (folder / INDEX_FILE).unlink()
    text = shown(folder, status=1)
    assert "in use  not known\n" in text
    assert f"index   {pipe}: is not a regular file. Remove it, or give another folder" in text


@pytest.mark.parametrize(
    ("size", "says"),
    [(0, "its beginning is gone: the file was cut"), (100_000, "has 97.66 KiB of the 244 KiB")],
)
def test_a_file_that_was_cut_while_an_engine_used_it_is_named(size, says, tmp_path, shown):
    """An engine writes after what is left of it, and so leaves zeros at its beginning."""
    disk = Disk(tmp_path, ranks=1)
    disk.put(1)
    with rank_file(tmp_path, 0).open("r+b") as file:
        file.truncate(size)
    assert says in shown(tmp_path, status=1)
    disk.put(6)
    if not size:
        assert says in shown(tmp_path, status=1)
    disk.close()


def test_a_slot_that_is_larger_than_its_file_is_said(tmp_path, shown):
    disk = Disk(tmp_path, ranks=1)
    disk.put(1)
    disk.close()
    file = rank_file(tmp_path, 0)
    forged = structs.replace(read_description(file), slot_bytes=1 << 50)
    with file.open("r+b") as opened:
        opened.write(forged.encode())
    text = shown(tmp_path, status=1)
    assert "has 244 KiB of the 9216 TiB that its first region describes" in text


def test_escapes_in_a_file_do_not_reach_the_terminal(tmp_path, shown):
    Disk(tmp_path, ranks=1, description={"model": "m\x1b[2J\nx"}).close()
    assert "model   m?[2J x\n" in shown(tmp_path)


@pytest.mark.parametrize(("name", "problem"), [("", "has no index.sqlite"), ("no", "No such file")])
def test_a_folder_that_is_none_of_ours_is_refused(name, problem, tmp_path, command):
    said = command("tier", tmp_path / name)
    assert said.status == 2
    assert said.out == ""
    assert said.err.startswith("kv-offload: ")
    assert problem in said.err
    assert said.err.endswith("Give the folder that an engine has as its disk.path\n")
