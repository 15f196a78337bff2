"""A shared folder: whole files or none, other processes' faults, and a bound that anyone keeps."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_swap.errors import JobError, TierError
from kv_swap.tiers.record import PAGE_BYTES
from kv_swap.tiers.remote import folder
from kv_swap.tiers.remote.client import Fate, object_keys
from kv_swap.tiers.remote.folder import FolderClient
from kv_swap.tiers.remote.sweep import AGE_SECONDS, Entry, sweep
from kv_swap.tiers.remote.tier import NUM_SLOTS

from tests.support.processes import ROOT
from tests.support.tier_bed import ALIGNED, DEMOTE, PROMOTE, Bed, FolderBed, block, job, named
from tests.support.waiting import wait_until

RECORD_BYTES = PAGE_BYTES + ALIGNED
PLENTY = 1 << 40
NAMES = named(8)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def bed(place: Path) -> Iterator[FolderBed]:
    with FolderBed(place) as bed:
        yield bed


def files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def taken_bytes(place: Path) -> int:
    """Return what all files take, also while some of them go."""
    total = 0
    for path in files(place):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def file_of(bed: FolderBed, name: bytes) -> Path:
    (key,) = object_keys(bed.tier.file_id, [name])
    return bed.client._file(key)


def test_files_are_for_this_user_alone(bed, place):
    bed.put(NAMES)
    assert len(files(place)) == 8
    for path in place.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_tier_without_slots_takes_rows_by_their_numbers(bed):
    assert bed.tier.num_slots == NUM_SLOTS
    with pytest.raises(JobError, match="slots 8 to 8 of the arena"):
        bed.tier.submit(job(1, DEMOTE, [(8, 0)], [b"a"]))


def test_keys_are_found_in_order_by_few_and_by_many_questions(place):
    with FolderBed(place, 200, 512) as bed:
        names = named(200)
        bed.put({slot: name for slot, name in names.items() if slot % 3 == 0})
        keys = object_keys(bed.tier.file_id, list(names.values()))
        assert bed.client.exist(keys) == [slot % 3 == 0 for slot in names]
        assert bed.client.exist(keys[:4]) == [True, False, False, True]
        assert bed.client.exist([]) == []


# -- what is not what it should be -----------------------------------------------------------------


def test_a_file_that_is_cut_while_it_is_read_is_a_mismatch(bed, monkeypatch):
    bed.put(NAMES)
    file, preadv = file_of(bed, NAMES[0]), os.preadv

    def cut(fd: int, memory: list[memoryview], offset: int) -> int:
        os.truncate(file, PAGE_BYTES)
        return preadv(fd, memory, offset)

    monkeypatch.setattr(os, "preadv", cut)
    done = bed.get({0: NAMES[0]})
    assert (done.failed, done.mismatches) == ((0,), 1)


# -- several writers -------------------------------------------------------------------------------


def test_two_write_the_same_at_once_while_others_read(place):
    names = named(64)
    with FolderBed(place, 64) as one, FolderBed(place, 64) as other, FolderBed(place, 64) as reads:
        results = []

        def write(bed: Bed) -> None:
            for slot, name in names.items():
                bed.view[slot] = block(name, ALIGNED)
            for _ in range(5):
                done = bed.run(DEMOTE, [(slot, slot) for slot in names], list(names.values()))
                results.append((done.failed, done.error))
                for path in files(place)[::2]:
                    if not path.name.startswith("."):
                        path.unlink(missing_ok=True)

        threads = [threading.Thread(target=write, args=(bed,)) for bed in (one, other)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            done = reads.get(names)
            assert (done.mismatches, done.error) == (0, None)
            assert set(reads.right(names)) >= set(names) - set(done.failed)
        for thread in threads:
            thread.join()
        assert results == [((), None)] * 10
        one.put(names)
        assert reads.get(names).failed == ()
        assert not [path for path in files(place) if path.name.startswith(".")]


WRITER = """
import os, signal, sys
from pathlib import Path
from tests.support.tier_bed import FolderBed, named
write, left = os.pwritev, [3]
def die_at_the_third(fd, memory, offset):
    left[0] -= 1
    if not left[0]:
        write(fd, [memory[0]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, memory, offset)
os.pwritev = die_at_the_third
FolderBed(Path(sys.argv[1])).put(named(8))
"""


def test_a_writer_that_is_killed_leaves_no_half_object(place):
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(place)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    unfinished = [path for path in files(place) if path.name.startswith(".")]
    assert unfinished
    with FolderBed(place) as bed:
        found = bed.get(NAMES)
        assert len(found.failed) == 8 - (len(files(place)) - len(unfinished))
        assert (found.mismatches, found.error) == (0, None)
        assert bed.put(NAMES).failed == ()
        assert bed.get(NAMES).failed == ()
        assert sweep(bed.client, PLENTY) == 0
        assert all(path.exists() for path in unfinished), "a writer may yet be at it"
        for path in unfinished:
            os.utime(path, (0, 0))
        assert sweep(bed.client, PLENTY) == 0
        assert not [path for path in files(place) if path.name.startswith(".")]


# -- a folder that fails ---------------------------------------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Have a call of `os` fail, as a filesystem makes it."""

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fails)


def test_a_folder_that_becomes_read_only_is_read(bed, monkeypatch):
    bed.put({0: NAMES[0]})
    os.utime(file_of(bed, NAMES[0]), (0, 0))
    with monkeypatch.context() as patched:
        opens = os.open

        def read_only(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & (os.O_CREAT | os.O_WRONLY):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return opens(path, flags, mode)

        patched.setattr(os, "open", read_only)
        refuse(patched, "utime", errno.EROFS)
        done = bed.put(NAMES)
        assert done.failed == (1, 2, 3, 4, 5, 6, 7)
        assert done.error is None, "one row is there"
        done = bed.put({1: NAMES[1]})
        assert "mount it writable" in str(done.error)
        assert bed.get({0: NAMES[0]}).failed == ()
    assert bed.put(NAMES).failed == ()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_a_file_that_is_stale_is_missing(bed, monkeypatch, number):
    bed.put(NAMES)
    with monkeypatch.context() as patched:
        refuse(patched, "preadv", number)
        done = bed.get(NAMES)
        assert (done.failed, done.mismatches, done.error) == (tuple(NAMES), 0, None)
    assert bed.get(NAMES).failed == ()


def test_a_disk_that_fails_is_an_error(bed, monkeypatch):
    bed.put(NAMES)
    refuse(monkeypatch, "preadv", errno.EIO)
    done = bed.get(NAMES)
    assert (done.failed, done.mismatches) == (tuple(NAMES), 0)
    assert "cannot read in" in str(done.error)


def test_a_folder_that_is_away_fails_jobs_until_it_is_back(bed, place):
    """As one that is not mounted; it is not made on the disk that is there then."""
    bed.put(NAMES)
    place.rename(place.with_name("away"))
    for done in (bed.put(NAMES), bed.get(NAMES)):
        assert done.failed == tuple(NAMES)
        assert f"cannot use the folder {place}: No such file" in str(done.error)
    with pytest.raises(TierError, match="cannot use the folder"):
        bed.client.exist(["kv-offload/a/b"])
    assert not place.exists()
    place.with_name("away").rename(place)
    assert bed.get(NAMES).failed == ()


def test_a_folder_that_goes_before_a_write_is_not_made(bed, place, monkeypatch):
    """It was there when the call began."""
    monkeypatch.setattr(FolderClient, "_check", lambda _: None)
    place.rename(place.with_name("away"))
    done = bed.put(NAMES)
    assert done.failed == tuple(NAMES)
    assert "cannot write in" in str(done.error)
    assert not place.exists()


def test_a_folder_that_refuses_direct_io_is_used_without(bed, monkeypatch):
    opens, asked = os.open, []

    def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
        fd = opens(path, flags & ~os.O_DIRECT, mode)  # Linux has made the file by then
        if flags & os.O_DIRECT:
            asked.append(path)
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", refuse_direct)
    assert bed.put(NAMES).failed == ()
    assert 1 <= len(asked) <= bed.client.threads, "once, by each thread at most"
    assert bed.get(NAMES).failed == ()
    assert bed.right(NAMES) == list(NAMES)


def test_a_read_that_comes_in_pieces(bed, monkeypatch):
    bed.put(NAMES)
    preadv, bed.client._is_direct = os.preadv, False
    monkeypatch.setattr(
        os, "preadv", lambda fd, memory, offset: preadv(fd, [memory[0][:1000]], offset)
    )
    assert bed.get(NAMES).failed == ()
    assert bed.right(NAMES) == list(NAMES)


def test_a_call_that_hangs_holds_up_no_submit_and_no_close(place, monkeypatch):
    bed = FolderBed(place)
    bed.put(NAMES)
    reached, goes_on, preadv = threading.Event(), threading.Event(), os.preadv

    def hang(fd: int, memory: list[memoryview], offset: int) -> int:
        reached.set()
        goes_on.wait(60)
        return preadv(fd, memory, offset)

    monkeypatch.setattr(os, "preadv", hang)
    began = time.process_time()
    bed.tier.submit(job(1, PROMOTE, [(0, 0)], [NAMES[0]]))
    assert reached.wait(60)
    assert bed.tier.poll() == []
    bed.tier.close(timeout_seconds=0.1)
    assert time.process_time() - began < 1
    goes_on.set()
    assert bed.tier.wait(60)
    (done,) = bed.tier.poll()
    assert done.failed == ()


# -- the bound -------------------------------------------------------------------------------------


def aged(bed: FolderBed, names: dict[int, bytes]) -> None:
    """Have each object be older than the next."""
    for slot, name in names.items():
        os.utime(file_of(bed, name), (AGE_SECONDS * (slot + 1),) * 2)


def left(bed: FolderBed, names: dict[int, bytes]) -> list[int]:
    return [slot for slot, name in names.items() if file_of(bed, name).exists()]


def test_the_oldest_go_until_there_is_room(place):
    names = named(32)
    with FolderBed(place, 32) as bed:
        bed.put(names)
        aged(bed, names)
        assert sweep(bed.client, 32 * RECORD_BYTES) == 0
        assert left(bed, names) == list(names)
        assert sweep(bed.client, 16 * RECORD_BYTES) == 17 * RECORD_BYTES
        assert left(bed, names) == list(names)[17:]


def test_of_objects_of_one_age_some_go_and_two_sweeps_remove_no_more_than_one(place):
    names = named(400)
    with FolderBed(place, 400, 4096) as bed:
        bed.put(names)
        for name in names.values():
            os.utime(file_of(bed, name), (0, 0))
        limit = 200 * (PAGE_BYTES + 4096)

        class Overtaken(FolderClient):
            """Has listed everything when another one sweeps."""

            def entries(self) -> Iterator[Entry]:
                yield from listed.pop() if listed else super().entries()

        other, late = FolderClient(place, PLENTY), Overtaken(place, PLENTY)
        listed = [list(other.entries())]
        sweep(other, limit)
        kept = left(bed, names)
        assert len(kept) == 187  # 15/16 of what fits
        assert sweep(late, limit) == 0
        assert left(bed, names) == kept


def test_a_full_filesystem_below_its_bound_loses_the_oldest(place):
    names = named(32)
    with FolderBed(place, 32) as bed:
        bed.put(names)
        aged(bed, names)
        assert sweep(bed.client, PLENTY, is_full=True) == 3 * RECORD_BYTES
        assert left(bed, names) == list(names)[3:]


def test_a_read_keeps_an_object(place):
    with FolderBed(place) as bed:
        bed.put(NAMES)
        aged(bed, NAMES)
        assert bed.get({0: NAMES[0]}).failed == ()
        assert time.time() - file_of(bed, NAMES[0]).stat().st_mtime < 60
        sweep(bed.client, 4 * RECORD_BYTES)
        assert left(bed, NAMES) == [0, 6, 7]


HOUR_SECONDS, YEAR_SECONDS = 3600, 365 * 86_400


def stamp(bed: FolderBed, names: Iterable[bytes], seconds: float) -> None:
    """Mark objects as used so many seconds from now."""
    for name in names:
        os.utime(file_of(bed, name), (time.time() + seconds,) * 2)


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_engine_whose_clock_is_an_hour_off_removes_the_same_objects(place, monkeypatch, hours):
    """Of objects of the last half hour the oldest go, and nothing that is being written."""
    names = named(32)
    with FolderBed(place, 32) as bed:
        bed.put(names)
        for slot, name in names.items():
            stamp(bed, [name], 60 * (slot - 32))
        written = file_of(bed, names[31])
        unfinished = written.with_name(f".{written.name}.0123456789abcdef")
        unfinished.touch()
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + hours * HOUR_SECONDS + 60)
        assert sweep(bed.client, 16 * RECORD_BYTES) == 17 * RECORD_BYTES
        assert left(bed, names) == list(names)[17:]
        assert unfinished.exists()


def test_what_an_engine_wrote_whose_clock_was_an_hour_ahead_goes_in_its_turn(place):
    """It goes after what others wrote within that hour, and before what they write later."""
    with FolderBed(place) as bed:
        bed.put(NAMES)
        stamp(bed, [NAMES[slot] for slot in range(4)], HOUR_SECONDS)
        stamp(bed, [NAMES[slot] for slot in (4, 5)], 0)
        stamp(bed, [NAMES[slot] for slot in (6, 7)], 2 * HOUR_SECONDS)
        assert sweep(bed.client, 7 * RECORD_BYTES) == 2 * RECORD_BYTES
        assert left(bed, NAMES) == [0, 1, 2, 3, 6, 7]
        assert sweep(bed.client, 3 * RECORD_BYTES) == 4 * RECORD_BYTES
        assert left(bed, NAMES) == [6, 7]


def test_what_is_marked_as_of_another_year_keeps_nothing_else_away(place):
    with FolderBed(place) as bed:
        bed.put(NAMES)
        stamp(bed, [NAMES[slot] for slot in range(4)], YEAR_SECONDS)
        assert sweep(bed.client, 5 * RECORD_BYTES) == 4 * RECORD_BYTES
        assert left(bed, NAMES) == [4, 5, 6, 7]


def test_a_read_by_a_clock_that_is_late_keeps_an_object(place):
    with FolderBed(place) as bed:
        bed.put(NAMES)
        stamp(bed, NAMES.values(), HOUR_SECONDS)
        assert bed.get({0: NAMES[0]}).failed == ()
        assert file_of(bed, NAMES[0]).stat().st_mtime < time.time() + 60


def test_files_of_others_in_the_folder_are_left_alone(place):
    with FolderBed(place) as bed:
        bed.put(NAMES)
        aged(bed, NAMES)
        part = file_of(bed, NAMES[0]).parent
        mine = [place / "a" / "b" / "c", place / "notes", part / "notes", part / ".nfs0001"]
        for path in mine:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(RECORD_BYTES))
            os.utime(path, (0, 0))
        sweep(bed.client, 1)
        assert left(bed, NAMES) == []
        assert all(path.exists() for path in mine)


def test_an_object_that_cannot_be_removed_keeps_no_other(place):
    with FolderBed(place) as bed:
        bed.put(NAMES)
        stuck = file_of(bed, NAMES[0])
        stuck.unlink()
        stuck.mkdir()
        aged(bed, NAMES)
        sweep(bed.client, 1)
        assert left(bed, NAMES) == [0]
        with pytest.raises(TierError, match="cannot remove"):
            sweep(bed.client, 1)


def test_who_writes_keeps_the_bound_while_others_read(place):
    """Writes eight times what fits; the reader sees hits and misses, and never anything wrong."""
    limit = 64 * RECORD_BYTES
    with FolderBed(place, 64, max_bytes=limit) as writes, FolderBed(place, 64) as reads:
        for number in range(8):
            names = named(64, f"round {number}")
            assert writes.put(names).failed == ()
            done = reads.get(names)
            assert (done.mismatches, done.error) == (0, None)
            assert set(reads.right(names)) == set(names) - set(done.failed)
            wait_until(lambda: taken_bytes(place) <= limit + limit // 64, "nobody sweeps")


def test_a_file_that_goes_while_it_is_read_stays_readable(bed, place, monkeypatch):
    bed.put(NAMES)
    preadv = os.preadv

    def remove_first(fd: int, memory: list[memoryview], offset: int) -> int:
        for path in files(place):
            path.unlink(missing_ok=True)
        return preadv(fd, memory, offset)

    monkeypatch.setattr(os, "preadv", remove_first)
    done = bed.get({0: NAMES[0]})
    assert (done.failed, done.mismatches) == ((), 0)
    assert bed.right({0: NAMES[0]}) == [0]


def test_a_full_folder_refuses_rows_and_is_swept(place, monkeypatch):
    names = named(32)
    with FolderBed(place, 32) as bed:
        bed.put(names)
        aged(bed, names)
        with monkeypatch.context() as patched:
            refuse(patched, "pwritev", errno.ENOSPC)
            done = bed.put({1: b"one more"})
            assert done.failed == (0,)
            assert "the store is full" in str(done.error)
        wait_until(lambda: left(bed, names) != list(names), "nothing makes room")
        assert bed.put({1: b"one more"}).failed == ()
    assert not [path for path in files(place) if path.name.startswith(".")]


def test_a_sweep_that_fails_is_logged_and_the_next_one_runs(place, caplog, monkeypatch):
    client = FolderClient(place, 1 << 20)
    real = FolderClient._walk
    failed = threading.Event()

    def fail(self: FolderClient) -> Iterator[os.DirEntry[str]]:
        failed.set()
        raise TierError("no")

    monkeypatch.setattr(FolderClient, "_walk", fail)
    client._sweeper.wrote(1)
    assert failed.wait(30)
    monkeypatch.setattr(FolderClient, "_walk", real)
    old = place / ("0" * 32) / "00" / ("0" * 32)
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(2 << 20))
    client._sweeper.wrote(1 << 20)
    wait_until(lambda: not old.exists())
    client.close()
    assert "could not be swept: " in caplog.text


def test_parts_that_are_not_whole_pages_are_not_asked_for_directly(place):
    client = FolderClient(place, PLENTY)
    memory = np.zeros(8192, np.uint8)
    key = object_keys("0" * 32, [b"a"])
    parts = [[(memory.ctypes.data + 1, 100)]]
    assert client.put(key, parts) == [Fate.DONE]
    assert client.get(key, parts) == [Fate.DONE]
    assert client._is_direct
    client.close()


def test_touch_seconds_spare_the_server(bed, monkeypatch):
    """A file that was used a moment ago is not marked again."""
    bed.put(NAMES)
    refuse(monkeypatch, "utime", errno.EIO)
    monkeypatch.setattr(folder, "TOUCH_SECONDS", 1e9)
    before = file_of(bed, NAMES[0]).stat().st_mtime_ns
    assert bed.get(NAMES).failed == ()
    assert file_of(bed, NAMES[0]).stat().st_mtime_ns == before
