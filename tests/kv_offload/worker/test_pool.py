"""Which seat of a pool an engine takes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from kv_swap.memory import reading
from kv_swap.memory.arena_file import find_arenas
from kv_swap.memory.mapping import release_addresses, reserve_addresses
from kv_swap.memory.reading import ReadMapping

from kv_offload.errors import ConfigError, UnsupportedError
from kv_offload.worker import pool
from kv_offload.worker.pool import Pool, Seat
from kv_offload.worker.sharing import ALONE
from tests.support.children import living_child

MODEL, OTHER = {"model": "a"}, {"model": "b"}
NBYTES = 8192


def alone(value: Any) -> list[Any]:
    return [value]


def start(folder: Path, contents: dict[str, str], ranks: int = 1) -> tuple[Seat, list[str]]:
    """Start an engine and make its arenas; return their names."""
    seat = Pool(folder, contents).take_seat(0, alone)
    names = []
    for rank in range(ranks):
        files = seat.arena_files(rank, ranks, "pages", ALONE, 2, reserve=True)
        with files.create(NBYTES) as shared:
            names.append(shared.name)
    return seat, names


def memory_of(seat: Seat) -> int:
    return sum(find_arenas(seat.folder).values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv-offload-0" / "chat"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LOCK_SECONDS", 0.0)


def test_an_engine_takes_the_seat_with_its_contents(folder: Path) -> None:
    first, _ = start(folder, MODEL)
    second, of_second = start(folder, OTHER)
    third, _ = start(folder, MODEL)
    assert [seat.folder.name for seat in (first, second, third)] == ["seat-0", "seat-1", "seat-2"]
    for seat in (first, second, third):
        seat.leave()
    again, names = start(folder, OTHER)
    assert (again.folder, names) == (second.folder, of_second)
    assert again.kept_bytes == memory_of(again) == NBYTES
    about = json.loads((again.folder / "about.json").read_text())
    assert (about["pid"], about["contents"]) == (os.getpid(), OTHER)
    assert (again.folder / "about.json").stat().st_mode & 0o777 == 0o600


def test_a_seat_of_other_contents_is_used_again_before_another_is_made(folder: Path) -> None:
    first, of_first = start(folder, MODEL)
    first.leave()
    second, of_second = start(folder, OTHER)
    assert second.folder == first.folder
    assert (second.kept_bytes, memory_of(second)) == (0, NBYTES)
    assert of_first != of_second


def test_what_ranks_left_of_other_contents_is_gone_before_any_rank_takes_memory(
    folder: Path,
) -> None:
    """Else a rank that is early could find no room beside the larger arena of another."""
    first, _ = start(folder, {"tensor_parallel_size": "1"}, ranks=1)
    first.leave()
    left = []

    def gather(own: Any) -> list[Any]:
        left.append(memory_of(first))
        return [own]

    assert memory_of(first) == NBYTES
    second = Pool(folder, {"tensor_parallel_size": "2"}).take_seat(0, gather)
    assert second.folder == first.folder
    assert left == [0]


def test_peers_that_read_a_seat_without_arenas_are_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have memory that was removed; of arenas that are there, the next engine takes over."""
    waits: list[float] = []
    monkeypatch.setattr(reading.time, "sleep", waits.append)
    first, (name,) = start(folder, MODEL)
    address = reserve_addresses(NBYTES)
    mapped = ReadMapping(address, NBYTES, first.folder / name, writable=False)
    first.leave()
    second = Pool(folder, MODEL).take_seat(0, alone)
    assert not second.wait_for_readers("a lack")
    second.leave()
    third = Pool(folder, OTHER).take_seat(0, alone)
    assert third.wait_for_readers("a lack")
    assert not Seat(third.folder, OTHER, 0).wait_for_readers("a lack"), "another rank"
    mapped.close()
    release_addresses(address, mapped.nbytes)
    assert not third.wait_for_readers("a lack")
    assert len(waits) == 2


def test_all_readers_of_a_folder_are_found_among_locks_of_others(tmp_path: Path) -> None:
    """In whatever order they came; another program may have locked any part of the folder."""
    with contextlib.ExitStack() as stack:
        for first, count in ((500, 1), (300, 1), (400, 1), (350, 20), (900, 0)):
            fd = os.open(tmp_path, os.O_RDONLY)
            stack.callback(os.close, fd)
            reading._control(fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, first, count)
        assert reading.find_readers(tmp_path) == [300, 400, 500]
    assert reading.find_readers(tmp_path) == []


def test_a_forked_child_keeps_neither_memory_nor_lock_of_a_removed_arena(
    memory_folder: Path,
) -> None:
    file = memory_folder / "rank-0.kind.token"
    with file.open("wb") as written:
        os.posix_fallocate(written.fileno(), 0, NBYTES)
    address = reserve_addresses(NBYTES)
    mapped = ReadMapping(address, NBYTES, file, writable=False)
    with living_child() as child:
        inode = file.stat().st_ino
        file.unlink()
        mapped.close()
        release_addresses(address, mapped.nbytes)
        assert reading.find_readers(memory_folder) == []
        held = [os.stat(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
        assert inode not in {found.st_ino for found in held if stat.S_ISREG(found.st_mode)}


def test_memory_that_a_process_still_has_is_not_counted_as_kept(folder: Path) -> None:
    """The next engine cannot adopt it, and takes as much again."""
    seat = Pool(folder, MODEL).take_seat(0, alone)
    files = seat.arena_files(0, 1, "pages", ALONE, 2, reserve=True)
    shared = files.create(NBYTES)
    seat.leave()
    second = Pool(folder, MODEL).take_seat(0, alone)
    assert (second.kept_bytes, memory_of(second)) == (0, NBYTES)
    second.leave()
    shared.close()
    assert Pool(folder, MODEL).take_seat(0, alone).kept_bytes == NBYTES


def test_the_seat_of_an_engine_that_just_ends_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A free seat without anything of its own would be taken, and all that was kept be lost."""
    first, of_first = start(folder, MODEL)
    second, _ = start(folder, OTHER)
    second.leave()
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        first.leave()

    monkeypatch.setattr(pool, "LOCK_SECONDS", 600.0)
    monkeypatch.setattr(pool.time, "sleep", sleep)
    again, names = start(folder, MODEL)
    assert (again.folder, names) == (first.folder, of_first)
    assert len(waits) == 1
    monkeypatch.setattr(pool, "LOCK_SECONDS", 0.0)
    assert start(folder, MODEL)[0].folder == second.folder  # it does not end


@pytest.mark.parametrize("change", ["rank", "num_ranks", "pages", "num_slots"])
def test_an_arena_with_another_layout_is_another_kind(folder: Path, change: str) -> None:
    def name(**more: Any) -> str:
        facts = {"rank": 0, "num_ranks": 2, "pages": "pages", "num_slots": 2, **more}
        with seat.arena_files(sharing=ALONE, reserve=True, **facts).create(NBYTES) as shared:
            return shared.name

    seat, _ = start(folder, MODEL)
    first = name()
    assert name() == first
    assert name(**{change: "other" if change == "pages" else 1 if change == "rank" else 3}) != first


def test_an_arena_from_before_a_reboot_is_another_kind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, of_first = start(folder, MODEL)
    first.leave()
    monkeypatch.setattr(pool, "read_boot", lambda: "another")
    second, of_second = start(folder, MODEL)
    assert second.folder == first.folder
    assert of_second != of_first


def test_every_rank_gets_the_seat_that_the_first_has_taken(folder: Path) -> None:
    """The others learn of it by what all of them give, and so they learn of what went wrong."""
    seat, _ = start(folder, MODEL)
    boot = pool.read_boot()
    other = Pool(folder, MODEL).take_seat(1, lambda own: [(boot, (seat.folder, 5), ""), own])
    assert (other.folder, other.kept_bytes, other.lock) == (seat.folder, 5, -1)
    with pytest.raises(UnsupportedError, match="several hosts"):
        Pool(folder, MODEL).take_seat(1, lambda own: [("other", (seat.folder, 5), ""), own])
    with pytest.raises(ConfigError, match="host_pool: no room"):
        Pool(folder, MODEL).take_seat(1, lambda own: [(boot, None, "no room"), own])


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host_pool: .*make the folder above it"):
        Pool(tmp_path / "none" / "kv-offload-0" / "chat", MODEL).take_seat(0, alone)


def test_what_was_not_used_for_long_in_another_pool_is_freed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless an engine has it, however long it rests. Some ended before they had a directory.

    What cannot be read is passed over.
    """
    names = ("bare", "new", "old", "rests", "young")
    pools = {name: start(folder.with_name(name), MODEL)[0] for name in names}
    past = time.time() - pool.ORPHAN_SECONDS - 10
    for name, seat in pools.items():
        if name != "rests":
            seat.leave()
        if name != "bare":
            (seat.folder / "directory").touch()
        if name != "young":
            for path in seat.folder.iterdir():
                os.utime(path, (past, past))
        if name == "new":
            (seat.folder / "about.json").touch()
    unreadable, find_seats = folder.with_name("a"), pool.find_seats
    unreadable.mkdir()

    def find(pool: Path) -> list[Path]:
        if pool == unreadable:
            raise PermissionError(pool)
        return find_seats(pool)

    monkeypatch.setattr(pool, "find_seats", find)
    start(folder, MODEL)
    kept = {name: memory_of(seat) for name, seat in pools.items()}
    assert kept == {"bare": 0, "new": NBYTES, "old": 0, "rests": NBYTES, "young": NBYTES}
    again, _ = start(folder.with_name("old"), MODEL)
    assert again.folder == pools["old"].folder


@pytest.mark.parametrize("lives", [False, True])
def test_of_a_pool_in_use_nothing_is_freed(folder: Path, lives: bool) -> None:
    """Its engines read what others left, however long ago, and so do those that start again."""
    other = folder.with_name("other")
    left, _ = start(other, MODEL)
    reader, _ = start(other, MODEL)
    past = time.time() - pool.ORPHAN_SECONDS - 10
    for path in [*left.folder.iterdir(), *(reader.folder.iterdir() if lives else ())]:
        os.utime(path, (past, past))
    for seat in (left,) if lives else (left, reader):
        seat.leave()
    start(folder, MODEL)
    assert memory_of(left) == memory_of(reader) == NBYTES
