"""`kv-offload pool`: what is listed, and what is removed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_offload.cache.directory import Directory
from kv_offload.tools.main import main
from kv_offload.worker.pool import Pool, Seat, user_folder
from kv_offload.worker.sharing import ALONE

NBYTES = 8192


def start(path: Path, name: str) -> Seat:
    """Start an engine with one readable slot of two."""
    seat = Pool(user_folder(path) / name, {"model": "org/model"}).take_seat(0, lambda own: [own])
    files = seat.arena_files(0, 1, "pages", ALONE, 2, reserve=True)
    arena, shared = files.create(NBYTES, 0)
    shared.close()
    directory = Directory(seat.folder, {0: arena}, 2)
    directory.publish(np.array([1], np.int32), [b"key"])
    directory.close()
    return seat


def listed(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["pool", "--path", str(path), "--json"]) == 0
    states: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return states


def test_pools_are_listed_with_who_runs_and_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "--path", str(tmp_path)]) == 0
    assert "no host pool" in capsys.readouterr().out
    start(tmp_path, "a").leave()
    seat = start(tmp_path, "b")
    other = start(tmp_path, "b")
    ended, running, peer = listed(tmp_path, capsys)
    assert [state["peers"] for state in (ended, running, peer)] == [0, 1, 1]
    other.leave()
    assert (ended["pool"], ended["pid"]) == ("a", None)
    assert (running["pool"], running["pid"]) == ("b", os.getpid())
    for state in (ended, running):
        assert (state["readable_slots"], state["slots"]) == (1, 2)
        assert (state["memory_bytes"], state["model"]) == (NBYTES, "org/model")
    assert main(["pool", "--path", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert f"runs, pid {os.getpid()}" in page
    assert "ended, began 0.0 h ago" in page
    seat.leave()


def test_only_what_no_engine_has_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seat = start(tmp_path, "chat")
    remove = ["pool", "--path", str(tmp_path), "--remove", "chat"]
    assert main(remove) == 2
    assert "running engines of pool 'chat': 1. Stop them first" in capsys.readouterr().err
    seat.leave()
    assert main(remove) == 0
    assert "freed 8 KiB of pool 'chat'" in capsys.readouterr().out
    assert listed(tmp_path, capsys) == [], "nothing is left to free"
    assert start(tmp_path, "chat").folder == seat.folder


@pytest.mark.parametrize("name", ["none", "..", "chat/seat-0"])
def test_a_pool_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    start(tmp_path, "chat").leave()
    assert main(["pool", "--path", str(tmp_path), "--remove", name]) == 2
    assert "there is no pool" in capsys.readouterr().err
    assert listed(tmp_path, capsys)[0]["memory_bytes"] == NBYTES


def test_a_folder_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path looks no different from a path without pools otherwise."""
    assert main(["pool", "--path", str(tmp_path / "shm")]) == 2
    assert f"{tmp_path}/shm: there is no such folder. Give the" in capsys.readouterr().err


@pytest.mark.parametrize("about", ['{"contents": 5}', '{"started": "x"}', "[" * 100_000, "[1]"])
def test_a_seat_whose_engine_says_nothing_is_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], about: str
) -> None:
    """As of one that was killed while it wrote it, or of another version."""
    seat = start(tmp_path, "chat")
    seat.leave()
    (seat.folder / "about.json").write_text(about)
    (state,) = listed(tmp_path, capsys)
    assert (state["model"], state["started"], state["readable_slots"]) == ("", None, 1)
    assert main(["pool", "--path", str(tmp_path), "--remove", "chat"]) == 0


def test_what_is_no_seat_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seat = start(tmp_path, "chat")
    seat.leave()
    (seat.folder / "lock").unlink()
    (seat.folder / "lock").mkdir()
    for words in ([], ["--remove", "chat"]):
        assert main(["pool", "--path", str(tmp_path), *words]) == 2
        assert f"{seat.folder}/lock: Is a directory. Look at it" in capsys.readouterr().err


def test_a_pipe_in_the_place_of_a_directory_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seat = start(tmp_path, "chat")
    seat.leave()
    (seat.folder / "directory").unlink()
    os.mkfifo(seat.folder / "directory")
    (state,) = listed(tmp_path, capsys)
    assert state["slots"] == 0
