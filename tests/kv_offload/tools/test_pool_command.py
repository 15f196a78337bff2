"""`kv-offload pool`: what is listed, and what is removed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_offload.cache.directory import Directory
from kv_offload.worker.pool import Pool, Seat, user_folder
from kv_offload.worker.sharing import ALONE
from tests.kv_offload.tools.conftest import Command, Done

NBYTES = 8192


def start(path: Path, name: str) -> Seat:
    """Start an engine with one readable slot of two."""
    seat = Pool(user_folder(path) / name, {"model": "org/model"}).take_seat(0, lambda own: [own])
    files = seat.arena_files(0, 1, "pages", ALONE, 2, reserve=True)
    with files.create(NBYTES) as shared:
        directory = Directory(seat.folder, {0: shared.name}, 2)
    directory.publish(np.array([1], np.int32), [b"key"])
    directory.close()
    return seat


@pytest.fixture
def pool(command: Command, tmp_path: Path) -> Command:
    def run(*words: str) -> Done:
        return command("pool", "--path", tmp_path, *words)

    return run


def listed(pool: Command) -> list[dict[str, Any]]:
    done = pool("--json")
    assert done.status == 0
    states: list[dict[str, Any]] = json.loads(done.out)
    return states


def test_pools_are_listed_with_who_runs_and_what_is_kept(tmp_path, pool):
    assert "no host pool" in pool().out
    start(tmp_path, "a").leave()
    seat = start(tmp_path, "b")
    other = start(tmp_path, "b")
    ended, running, peer = listed(pool)
    assert [state["peers"] for state in (ended, running, peer)] == [0, 1, 1]
    other.leave()
    assert (ended["pool"], ended["pid"]) == ("a", None)
    assert (running["pool"], running["pid"]) == ("b", os.getpid())
    for state in (ended, running):
        assert (state["readable_slots"], state["slots"]) == (1, 2)
        assert (state["memory_bytes"], state["model"]) == (NBYTES, "org/model")
    page = pool().out
    assert f"runs, pid {os.getpid()}" in page
    assert "ended, began 0.0 h ago" in page
    seat.leave()


def test_only_what_no_engine_has_is_removed(tmp_path, pool):
    seat = start(tmp_path, "chat")
    refused = pool("--remove", "chat")
    assert refused.status == 2
    assert "running engines of pool 'chat': 1. Stop them first" in refused.err
    seat.leave()
    assert pool("--remove", "chat") == (0, "freed 8 KiB of pool 'chat'\n", "")
    assert listed(pool) == [], "nothing is left to free"
    assert start(tmp_path, "chat").folder == seat.folder


@pytest.mark.parametrize("name", ["none", "..", "chat/seat-0"])
def test_a_pool_that_is_not_there_is_refused(tmp_path, pool, name):
    start(tmp_path, "chat").leave()
    refused = pool("--remove", name)
    assert refused.status == 2
    assert "there is no pool" in refused.err
    assert listed(pool)[0]["memory_bytes"] == NBYTES


def test_a_folder_that_does_not_exist_is_refused(tmp_path, command):
    """A mistyped path looks no different from a path without pools otherwise."""
    for path in (tmp_path / "shm", tmp_path / ("x" * 300)):
        refused = command("pool", "--path", path)
        assert refused.status == 2
        assert f"{path}: there is no such folder. Give the" in refused.err


NONSENSE = [
    *(b'{"contents": 5}', b'{"started": "x"}', b'{"contents": {"model": "\xff"}}'),
    *(b"[" * 100_000, b"[1]"),
]


@pytest.mark.parametrize("about", NONSENSE)
def test_a_seat_whose_engine_says_nothing_is_listed_and_removed(tmp_path, pool, about):
    """As of one that was killed while it wrote it, or of another version."""
    seat = start(tmp_path, "chat")
    seat.leave()
    (seat.folder / "about.json").write_bytes(about)
    (state,) = listed(pool)
    assert (state["model"], state["started"], state["readable_slots"]) == ("", None, 1)
    assert pool("--remove", "chat").status == 0


def test_what_is_no_seat_is_named(tmp_path, pool):
    seat = start(tmp_path, "chat")
    seat.leave()
    (seat.folder / "lock").unlink()
    (seat.folder / "lock").mkdir()
    for words in ([], ["--remove", "chat"]):
        refused = pool(*words)
        assert refused.status == 2
        assert f"{seat.folder}/lock: Is a directory. Look at it" in refused.err


def test_a_pipe_in_the_place_of_a_directory_is_not_waited_for(tmp_path, pool):
    seat = start(tmp_path, "chat")
    seat.leave()
    (seat.folder / "directory").unlink()
    os.mkfifo(seat.folder / "directory")
    (state,) = listed(pool)
    assert state["slots"] == 0
