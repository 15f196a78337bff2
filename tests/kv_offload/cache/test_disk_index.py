"""What a restart finds of what a disk held, also after kills, damage and full disks."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import itertools
import os
import random
import shutil
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kv_offload.cache.disk_index import DiskIndex, index
from kv_offload.cache.disk_index.contents import row_sum
from kv_offload.cache.disk_index.file import NO_INDEX, SUFFIXES
from kv_offload.errors import ConfigError
from kv_offload.tools.tier.index import read_index
from tests.support import disk_uses
from tests.support.filesystems import as_another_user, in_memory, no_file_grows_beyond, on_a_file
from tests.support.processes import kill_group, run_code, start_module
from tests.support.waiting import LIMIT_SECONDS, wait_until

MODEL = {"model": "llama", "dtype": "bfloat16"}
FILES = {"0": "a1", "1": "b2"}
NUM_SLOTS = 64

EXT4_IOC_SHUTDOWN = 0x8004587D
EXT4_GOING_FLAGS_NOLOGFLUSH = 2
"""From Linux' fs/ext4/ext4.h: the filesystem writes nothing any more."""


def slots(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def keys(*numbers: int) -> list[bytes]:
    return [b"key of block %d" % number for number in numbers]


@contextlib.contextmanager
def opened(path: Path, **other: Any) -> Iterator[DiskIndex]:
    """An index that is closed at the end; `other` has arguments that differ."""
    arguments = {"description": MODEL, "files": FILES, "num_slots": NUM_SLOTS, **other}
    made = DiskIndex(path, **arguments)
    try:
        yield made
    finally:
        made.close(LIMIT_SECONDS)


def contents(found: DiskIndex) -> list[tuple[bytes, int]]:
    return list(zip(found.keys, found.slots.tolist(), strict=True))


@pytest.fixture
def path(memory_folder: Path) -> Path:
    return memory_folder / "index.sqlite"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0.01)
    monkeypatch.setattr(index, "RETRY_SECONDS", 0.05)


def test_a_restart_goes_on_with_what_was_there_the_least_recently_used_first(path):
    with opened(path) as first:
        assert (first.reason, contents(first)) == (NO_INDEX, [])
        assert len(first.generation) == 16
        first.put(keys(1, 2, 3, 4), slots(10, 11, 12, 13))
        first.use(slots(11, 10))
        first.remove(slots(12))
        first.put(keys(5), slots(13))
    for _ in range(2):
        with opened(path) as again:
            assert again.reason == ""
            assert again.generation == first.generation
            assert contents(again) == list(zip(keys(2, 1, 5), (11, 10, 13), strict=True))
            assert again.slots.dtype == np.int32
    with opened(path) as last:
        last.use(slots(11))
    with opened(path) as again:
        assert again.slots.tolist() == [10, 13, 11]


CHANGES = {
    "another dtype": (
        {"description": {**MODEL, "dtype": "float16"}},
        "dtype was 'bfloat16', is 'float16'",
    ),
    "something new": ({"description": {**MODEL, "lora": "on"}}, "lora was None, is 'on'"),
    "two things": (
        {"description": {"dtype": "bfloat16"}, "num_slots": 32},
        "model was 'llama', is None; it had 64 slots, and there are 32",
    ),
    "another file": ({"files": {**FILES, "1": "c3"}}, "the file of rank 1 is a different one"),
    "another rank": ({"files": {**FILES, "2": "c3"}}, "the file of rank 2 is a different one"),
}


@pytest.mark.parametrize(("other", "reason"), CHANGES.values(), ids=CHANGES)
def test_what_has_changed_begins_empty_and_says_what(path, other, reason):
    with opened(path) as first:
        first.put(keys(1), slots(0))
    with opened(path, **other) as changed:
        assert (changed.reason, changed.keys) == (reason, [])
        assert changed.generation != first.generation
        changed.put(keys(2), slots(1))
    with opened(path, **other) as again:
        assert (again.reason, contents(again)) == ("", [(keys(2)[0], 1)])


def test_after_a_reset_a_restart_begins_empty(path, quick):
    """Whatever was put since: it may be of weights that the restarted engine does not have."""
    with opened(path) as first:
        before = first.generation
        first.put(keys(1, 2), slots(0, 1))
        first.clear()
        assert first.generation != before
        assert first.wait_ended(LIMIT_SECONDS)
        first.put(keys(3), slots(2))
        first.use(slots(0))
        assert not path.exists()
    assert first.errors == 0
    assert not path.exists()
    with opened(path) as again:
        assert (again.reason, again.keys) == (NO_INDEX, [])
        assert again.generation not in (before, first.generation)
    with opened(path) as once_more:
        assert once_more.reason == ""


def test_what_is_noted_can_be_read_while_an_engine_runs(path, quick):
    now = time.time() * 1e6
    with opened(path) as running:
        running.put(keys(1, 2), slots(3, 4))
        wait_until(lambda: len(read_index(path).keys) == 2)
        said = read_index(path)
        assert (said.description, said.files, said.num_slots) == (MODEL, FILES, NUM_SLOTS)
        assert said.used.tolist() == sorted(said.used.tolist())
        assert 0 < said.used[0] - now < 60e6
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_index(path.with_name("other.sqlite"))


def test_who_has_it_open_with_sqlite_at_a_start_costs_nothing(path, quick, monkeypatch):
    """An operator's `sqlite3`, which holds a lock as long as it is open: SQLite waits for it."""
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0.2))
    with opened(path) as first:
        first.put(keys(1, 2), slots(3, 4))
    code = (
        "import sqlite3, sys; file = sqlite3.connect(sys.argv[1]);"
        "print(file.execute('SELECT count(*) FROM slots').fetchone()[0], flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"2\n"
        with opened(path) as running:
            assert (running.reason, running.keys) == ("", keys(1, 2))
            running.put(keys(5), slots(6))
            wait_until(lambda: len(read_index(path).keys) == 3)
        reader.communicate()
    with opened(path) as again:
        assert again.keys == keys(1, 2, 5)


def run_and_kill(
    folder: Path, commit_seconds: float, seconds: float, reset_after: int = -1, writes: bool = False
) -> int:
    """Let a process change the index for some time, kill it; return how many changes it made."""
    done, log = folder / "index.done", folder / "log"
    done.unlink(missing_ok=True)
    words = [str(folder / "index.sqlite"), str(commit_seconds), str(reset_after)]
    process = start_module("tests.support.disk_uses", *words, stdout=log, stderr=log, forks=False)
    try:
        wait_until(lambda: (done.exists() and done.stat().st_size) or process.poll() is not None)
        wait_until(lambda: not writes or read_index(folder / "index.sqlite").keys)
        time.sleep(seconds)
        assert process.poll() is None, log.read_text()
    finally:
        kill_group(process)
    return int(np.fromfile(done, np.int64)[0])


def test_it_is_read_as_it_is_at_one_moment_though_its_log_begins_anew_meanwhile(
    path, quick, monkeypatch
):
    """Ten groups of slots get their keys of one round after the other."""
    count, groups, copy = 5000, 10, shutil.copyfile
    log = path.with_name(f"{path.name}-wal")
    steps = itertools.count()
    waited = False
    with opened(path, num_slots=count) as running:

        def put_group() -> None:
            turn, group = divmod(next(steps), groups)
            chosen = range(group, count, groups)
            running.put([b"%d.%d" % (turn, slot) for slot in chosen], slots(*chosen))

        def copy_slowly(source: Path, target: Path) -> None:
            nonlocal waited
            copy(source, target)
            if source == path and not waited:
                waited, header = True, log.read_bytes()[:32]
                while log.read_bytes()[:32] == header:
                    put_group()
                    time.sleep(0.02)

        for _ in range(groups):
            put_group()
        wait_until(lambda: len(read_index(path).keys) == count)
        monkeypatch.setattr(shutil, "copyfile", copy_slowly)
        found = read_index(path)
        turns = {int(key.partition(b".")[0]) for key in found.keys}
        assert waited
        assert len(found.keys) == count
        assert max(turns) - min(turns) <= 1 < min(turns)


def test_nothing_of_it_is_mapped(path, quick):
    """A full btrfs has no room for a page that was written before, and ends who writes it."""
    with opened(path) as running:
        running.put(keys(1), slots(3))
        wait_until(lambda: len(read_index(path).keys) == 1)
        assert str(path.parent) not in Path("/proc/self/maps").read_text()
    with opened(path) as again:
        assert again.keys == keys(1)
        assert str(path.parent) not in Path("/proc/self/maps").read_text()


def test_a_kill_leaves_what_there_was_at_one_moment(path):
    """Whatever the process does when it is killed; the next one goes on with what it finds.

    `KILLS=200` kills more often, and `COMMIT_SECONDS=0.5` as seldom written as in an engine.
    """
    moments, found_at, behind = random.Random(7), 0, []
    commit_seconds = float(os.environ.get("COMMIT_SECONDS", "0.01"))
    for number in range(int(os.environ.get("KILLS", "8"))):
        seconds = moments.uniform(0, 9 * commit_seconds)
        done = run_and_kill(path.parent, commit_seconds, seconds, writes=number > 3)
        killed = disk_uses.open_index(path)
        killed.close(LIMIT_SECONDS)
        found = contents(killed)
        if found:
            assert killed.reason == ""
            last_put = disk_uses.last_put(killed)
            assert last_put >= found_at
            found_at = last_put
            assert found in [disk_uses.expected(last_put + more) for more in (1, 2, 3)]
            behind.append(done - last_put)
    assert behind, "some process came to write"
    print(f"a kill lost {statistics.median(behind)} changes, {max(behind)} at most")


def test_a_kill_after_a_reset_leaves_nothing_that_was_put_later(path):
    """On a busy machine the first kills come before the reset: later ones leave more time."""
    moments, reset_at, found = random.Random(7), 20, []
    while len(found) < 6 or NO_INDEX not in found:
        for file in path.parent.iterdir():
            file.unlink()
        run_and_kill(path.parent, 0.002, moments.uniform(0, 0.01 * (6 + len(found))), reset_at)
        killed = disk_uses.open_index(path)
        killed.close(LIMIT_SECONDS)
        found.append(killed.reason)
        assert disk_uses.last_put(killed) < reset_at


def test_a_reset_that_was_answered_holds_though_the_process_is_killed_at_once(path):
    """Each call on the index takes half a second, as on a slow disk."""
    code = (
        "import os, pathlib, signal, time\n"
        "import numpy as np\n"
        "from kv_offload.cache.disk_index import DiskIndex, file\n"
        f"index = DiskIndex(pathlib.Path({str(path)!r}), {MODEL}, {FILES}, {NUM_SLOTS})\n"
        f"index.put({keys(1, 2)}, np.array([0, 1], np.int32))\n"
        "time.sleep(1)\n"
        "fsync = os.fsync\n"
        "os.fsync = lambda *file: (time.sleep(0.5), fsync(*file))\n"
        "index.clear()\n"
        "assert index.wait_ended(20)\n"
        "print('answered', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env=environment
    )
    assert killed.stdout == b"answered\n", killed.stderr.decode()
    with opened(path) as again:
        assert (again.reason, again.keys) == (NO_INDEX, [])


@pytest.mark.parametrize("how", ["moved", "linked"])
def test_an_index_that_is_elsewhere_by_now_is_emptied_there(path, quick, how):
    folder, moved = path.parent / "nvme", path.parent / "moved"
    folder.mkdir()
    with opened(folder / path.name) as first:
        first.put(keys(1, 2), slots(0, 1))
    with opened(folder / path.name) as running:
        assert (running.keys, running.generation) == (keys(1, 2), first.generation)
        if how == "moved":
            folder.rename(moved)
        else:
            moved.mkdir()
            (moved / path.name).hardlink_to(folder / path.name)
        running.clear()
        assert running.wait_ended(LIMIT_SECONDS)
    with opened(moved / path.name) as again:
        assert again.keys == []
        assert again.generation != first.generation


def damaged(content: bytes, numbers: random.Random) -> bytes:
    harmed, at = bytearray(content), numbers.randrange(len(content))
    kind = numbers.choice(["bit", "bytes", "cut", "blank", "longer"])
    if kind == "bit":
        harmed[at] ^= 1 << numbers.randrange(8)
    elif kind == "bytes":
        harmed[at : at + 8] = numbers.randbytes(8)
    elif kind == "cut":
        del harmed[at:]
    elif kind == "blank":
        harmed[at : at + 4096] = bytes(len(harmed[at : at + 4096]))
    else:
        harmed += numbers.randbytes(at)
    return bytes(harmed)


@pytest.mark.parametrize("file", ["index.sqlite", "index.sqlite-wal", "index.sqlite-shm"])
def test_whatever_has_become_of_a_file_it_opens_and_nothing_is_there_twice(file, tmp_path):
    """`DAMAGES=2000` tries more."""
    run_and_kill(tmp_path, 0.002, 0.2)
    if file == "index.sqlite":
        disk_uses.open_index(tmp_path / file).close(LIMIT_SECONDS)  # now it has all of it
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("index.sqlite*")}
    numbers, reasons = random.Random(7), set[str]()
    for count in range(int(os.environ.get("DAMAGES", "50"))):
        folder = tmp_path / str(count)
        folder.mkdir()
        for name, content in whole.items():
            (folder / name).write_bytes(damaged(content, numbers) if name == file else content)
        tried = disk_uses.open_index(folder / "index.sqlite")
        found = contents(tried)
        assert len({key for key, _ in found}) == len({slot for _, slot in found}) == len(found)
        assert {slot for _, slot in found} <= {*range(disk_uses.NUM_SLOTS)}
        tried.put([b"new"], slots(5))
        tried.close(LIMIT_SECONDS)
        again = disk_uses.open_index(folder / "index.sqlite")
        again.close(LIMIT_SECONDS)
        if tried.reason:
            assert (found, tried.errors) == ([], 0)
        if tried.errors == 0:
            expected = [pair for pair in found if pair[1] != 5]
            assert contents(again) == [*expected, (b"new", 5)]
        reasons.add(tried.reason)
        shutil.rmtree(folder)
    assert "" in reasons, "not all damage matters"
    assert len(reasons) > 3 or file != "index.sqlite"


def test_what_is_no_index_of_this_version_is_named(path):
    def reason(content: bytes = b"", *sql: str) -> str:
        with opened(path) as good:
            good.put(keys(1, 2), slots(1, 2))
        if content:
            path.write_bytes(content)
        else:
            with contextlib.closing(sqlite3.connect(path)) as database:
                database.create_function("sum_of", 2, functools.partial(row_sum, good.generation))
                for statement in sql:
                    database.execute(statement)
                database.commit()
        with opened(path) as begun:
            assert begun.keys == []
            return begun.reason

    cache = "It is only a cache: the next engine that uses this folder creates a new one"
    assert reason(b"no database" * 100) == (
        f"{path}: cannot be used: file is not a database. {cache}"
    )
    assert reason(b"", "PRAGMA user_version = 7") == (
        f"{path}: cannot be used: it has format 7, not 2. {cache}"
    )
    for problem, statement in {
        "two slots have one key": "UPDATE slots SET key = x'00', sum = sum_of(slot, x'00')",
        "a slot does not exist": f"UPDATE slots SET slot = {NUM_SLOTS}, "
        f"sum = sum_of({NUM_SLOTS}, key) WHERE slot = 1",
        "a time does not exist": "UPDATE slots SET used = 9223372036854775807 WHERE slot = 1",
        "a time is not an integer": "UPDATE slots SET used = 1e300",
        "a key is not bytes": "UPDATE slots SET key = 'text' WHERE slot = 1",
        "its tables are not those": "CREATE INDEX other ON slots (used)",
        "not enough values to unpack": "DELETE FROM meta",
        "a description is not a mapping": "UPDATE meta SET description = '[]'",
        "a value is not text": "UPDATE meta SET files = '{\"0\": 1}'",
        "the generation has 1 bytes": "UPDATE meta SET generation = x'00'",
        "the generation is not bytes": "UPDATE meta SET generation = NULL",
        "the number of slots is not an integer": "UPDATE meta SET num_slots = 'many'",
    }.items():
        assert problem in reason(b"", statement)


def test_one_that_can_be_read_but_not_written_begins_empty(path):
    with opened(path) as first:
        first.put(keys(1), slots(1))
    content = bytearray(path.read_bytes())
    content[18] = 3  # SQLite's number of the format for writing
    path.write_bytes(content)
    with opened(path) as again:
        assert "cannot be written: attempt to write a readonly database" in again.reason
        again.put(keys(2), slots(2))
    with opened(path) as third:
        assert (third.reason, third.keys) == ("", keys(2))


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("UPDATE slots SET key = x'00' WHERE slot = 1", keys(2)),
        ("UPDATE slots SET slot = 3 WHERE slot = 1", keys(2)),
        ("UPDATE slots SET sum = NULL WHERE slot = 1", keys(2)),
        ("UPDATE meta SET generation = x'000102030405060708090a0b0c0d0e0f'", []),
    ],
)
def test_a_row_without_its_sum_is_left_out(path, change, left):
    with opened(path) as first:
        first.put(keys(1, 2), slots(1, 2))
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(change)
        database.commit()
    with opened(path) as again:
        assert (again.reason, again.keys) == ("", left)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught, opened(path):
        pass
    return str(caught.value)


def test_a_path_that_cannot_be_used_is_refused_with_the_remedy(tmp_path):
    remedy = "Give disk.path a folder that exists, that this user may write, and that has room"
    file = tmp_path / "file"
    file.touch()
    for path, problem in {
        tmp_path / "missing" / "index.sqlite": "No such file or directory",
        file / "index.sqlite": "Not a directory",
    }.items():
        assert refusal(path) == f"kv-offload: {path}: cannot be used: {problem}. {remedy}"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("suffix", [".lock", *SUFFIXES])
def test_what_is_no_file_is_refused_where_sqlite_would_wait_for_it(path, suffix, make):
    with opened(path):
        pass
    file = path.with_name(path.name + suffix)
    file.unlink(missing_ok=True)
    make(file)
    assert refusal(path) == (
        f"kv-offload: {file}: is not a regular file. Remove it, or give another folder as disk.path"
    )


def test_a_folder_or_file_of_another_user_is_refused():
    with tempfile.TemporaryDirectory() as folder:  # it lies where every user gets
        path = Path(folder) / "index.sqlite"
        with opened(path) as mine:
            mine.put(keys(1), slots(1))
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
        for file in path.parent.iterdir():
            file.chmod(0o666)
        for mode in (0o700, 0o755):
            path.parent.chmod(mode)
            with as_another_user():
                why = "Permission denied" if mode == 0o700 else "it belongs to user 0"
                assert f"cannot be used: {why}. Give disk.path a " in refusal(path)
                if mode == 0o755:
                    assert read_index(path).keys == keys(1), "to look at it takes no more"
        assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_one_engine_has_a_file_until_it_ends(path):
    with opened(path) as running:
        running.put(keys(1), slots(0))
        assert refusal(path) == (
            f"kv-offload: {path}: another engine uses it. Give each engine its own disk.path, "
            f"or stop the other one; `fuser {path}.lock` names its process"
        )
        running.close(LIMIT_SECONDS)
        with opened(path) as later:
            assert later.keys == keys(1)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture(params=["limit", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A folder, and what makes it full for a while."""
    if request.param == "limit":
        yield tmp_path, lambda: no_file_grows_beyond(1)
        return
    with in_memory(tmp_path, "512k"):
        yield tmp_path, lambda: full(tmp_path)


def seen_by_another(path: Path) -> list[bytes]:
    """Return the keys that another process reads, to which the limit of this one is none."""
    look = (
        "import pathlib, resource\n"
        "from kv_offload.tools.tier.index import read_index\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        f"print(read_index(pathlib.Path({str(path)!r})).keys)\n"
    )
    found: list[bytes] = ast.literal_eval(run_code(look))
    return found


def test_a_full_disk_is_counted_and_what_came_meanwhile_is_written_later(disk, quick, caplog):
    folder, fill = disk
    path = folder / "index.sqlite"
    with opened(path) as running:
        running.put(keys(1, 2), slots(1, 2))
        wait_until(lambda: len(read_index(path).keys) == 2)
        with fill():
            for number in range(3, 40):
                running.put(keys(number), slots(number))
            running.remove(slots(1))
            wait_until(lambda: running.errors > 2)
            assert seen_by_another(path) == keys(1, 2)
        errors = running.errors
        wait_until(lambda: read_index(path).keys == keys(*range(2, 40)))
        assert running.errors <= errors + 1
    (message,) = caplog.messages
    assert f"kv-offload: {path}: the disk index cannot be written: " in message
    with opened(path) as again:
        assert contents(again) == list(zip(keys(*range(2, 40)), range(2, 40), strict=True))


class NoKey:
    """What SQLite does not take, and only finds when it writes it."""

    def __bytes__(self) -> bytes:
        return b"no key"


def test_of_changes_that_cannot_all_be_written_none_is(path, quick):
    """Not the removals either, which come first. Once it is possible all of them are."""
    with opened(path) as running:
        running.put(keys(1, 2), slots(1, 2))
        wait_until(lambda: len(read_index(path).keys) == 2)
        running.remove(slots(1))
        no_key: Any = NoKey()
        running.put([*keys(3), no_key], slots(3, 4))
        wait_until(lambda: running.errors > 1)
        assert read_index(path).slots.tolist() == [1, 2]
        running.put(keys(4), slots(4))
        wait_until(lambda: read_index(path).keys == keys(2, 3, 4))


def test_an_index_that_vanishes_while_it_is_opened_cannot_be_read(path, monkeypatch):
    with opened(path):
        pass

    copy = shutil.copyfile

    def vanish(*files: Path) -> Path:
        path.unlink()
        return copy(*files)

    monkeypatch.setattr(shutil, "copyfile", vanish)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_index(path)


def test_no_room_for_the_copy_that_is_read_is_told_with_its_remedy(tmp_path, path, monkeypatch):
    with opened(path):
        pass
    small = tmp_path / "small"
    small.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(small))
    with (
        in_memory(small, "4k"),
        pytest.raises(ConfigError) as caught,
    ):
        read_index(path)
    assert str(caught.value) == (
        f"kv-offload: {path}: cannot be read: No space left on device. A copy of it is read, in "
        f"{small}: set TMPDIR to a folder with more room"
    )


def test_an_error_of_any_kind_ends_neither_the_thread_nor_what_is_written_later(
    path, quick, monkeypatch
):
    with opened(path) as running:
        with monkeypatch.context() as failing:
            failing.setattr(index.Changes, "write", mock.Mock(side_effect=MemoryError))
            running.put(keys(1, 2), slots(1, 2))
            wait_until(lambda: running.errors > 2)
        wait_until(lambda: read_index(path).keys == keys(1, 2))


def test_memory_does_not_grow_while_nothing_can_be_written(path, quick, monkeypatch):
    """Also where the thread itself hangs in a call of the disk."""
    hangs, continues = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        hangs.set()
        assert continues.wait(LIMIT_SECONDS)

    monkeypatch.setattr(index.Changes, "write", hang)
    numbers = slots(*range(NUM_SLOTS))
    with opened(path) as running:
        running.put(keys(1), slots(1))
        assert hangs.wait(LIMIT_SECONDS)
        running.put(keys(*range(NUM_SLOTS)), numbers)
        tracemalloc.start()
        for _ in range(500):
            running.put(keys(*range(NUM_SLOTS)), numbers)
            running.use(numbers)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        continues.set()
    assert grown < 100_000, "the same slots, 1,000 times"


def test_a_reset_is_not_lost_on_a_full_disk(disk, quick):
    folder, fill = disk
    path = folder / "index.sqlite"
    with opened(path) as running:
        running.put(keys(*range(NUM_SLOTS)), slots(*range(NUM_SLOTS)))
        wait_until(lambda: len(read_index(path).keys) == NUM_SLOTS)
        with fill():
            running.clear()
            running.put(keys(1), slots(1))
            assert running.wait_ended(LIMIT_SECONDS)
            running.close(LIMIT_SECONDS)
    with opened(path) as again:
        assert again.keys == []


@pytest.fixture
def power(tmp_path: Path) -> Iterator[tuple[Path, Any, Any]]:
    """A folder; what cuts the power, so that what was not flushed is gone; and what has it back."""
    folder, image = tmp_path / "folder", tmp_path / "image"

    def cut() -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", EXT4_GOING_FLAGS_NOLOGFLUSH))
        os.close(descriptor)

    def start_again() -> None:
        subprocess.run(["umount", folder], check=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True)

    with on_a_file(folder, image):
        yield folder, cut, start_again


def test_a_reset_is_not_undone_where_the_power_is_cut(power, quick):
    folder, cut, start_again = power
    path = folder / "index.sqlite"
    with opened(path) as running:
        running.put(keys(1, 2), slots(0, 1))
        wait_until(lambda: len(read_index(path).keys) == 2)
        os.sync()
        running.put(keys(3), slots(2))
        wait_until(lambda: len(read_index(path).keys) == 3)
        running.clear()
        assert running.wait_ended(LIMIT_SECONDS)
        cut()
    start_again()
    with opened(path) as again:
        assert again.reason == NO_INDEX


def test_a_reset_that_cannot_reach_the_disk_is_not_taken_for_done(power, quick):
    """Once the disk is back, what was there before is found: so somebody has to be told."""
    folder, cut, start_again = power
    path = folder / "index.sqlite"
    with opened(path) as running:
        running.put(keys(1, 2), slots(0, 1))
        wait_until(lambda: len(read_index(path).keys) == 2)
        os.sync()
        cut()
        running.clear()
        wait_until(lambda: running.errors > 1)
        assert not running.wait_ended(0)
        assert f"{path} cannot be removed or emptied: " in running.problem
    start_again()
    with opened(path) as again:
        assert again.keys == keys(1, 2)


def test_no_room_at_the_start_is_refused(disk):
    folder, fill = disk
    path = folder / "index.sqlite"
    with fill():
        assert "and that has room" in refusal(path)
    with opened(path) as later:
        assert later.keys == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_vanishes_is_counted_and_nothing_else(replaced, path, quick):
    folder = path.parent / "nvme"
    folder.mkdir()
    with opened(folder / path.name) as running:
        running.put(keys(1), slots(1))
        shutil.rmtree(folder)
        if replaced:
            folder.mkdir()
            with opened(folder / path.name) as other:
                other.put(keys(7), slots(7))
        running.put(keys(2), slots(2))
        running.use(slots(1))
        wait_until(lambda: running.errors > 1)
    assert folder.exists() == replaced
    if replaced:
        assert read_index(folder / path.name).keys == keys(7)
