"""The directory of an arena: what a process that ends anywhere leaves of it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache import directory
from kv_offload.cache.directory import (
    DIRECTORY,
    ENTRY_BYTES,
    HEADER_BYTES,
    PAGES_BYTES,
    Directory,
    file_bytes,
)
from kv_offload.cache.key_index import KEY_BYTES
from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.policies import make_policy

FILES = {0: "rank-0.kind.1", 1: "rank-1.kind.2"}
OLD, NEW = b"old" * 12, b"a new key" * 4
SLOT = np.array([2], np.int32)


def found(directory: Directory) -> dict[int, bytes]:
    slots, keys = directory.read(0, 4)
    return dict(zip(slots.tolist(), keys, strict=True))


def entry(folder: Path) -> bytes:
    start = HEADER_BYTES + 2 * PAGES_BYTES + 2 * ENTRY_BYTES
    return (folder / DIRECTORY).read_bytes()[start : start + ENTRY_BYTES]


def put_entry(folder: Path, content: bytes) -> None:
    with (folder / DIRECTORY).open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * PAGES_BYTES + 2 * ENTRY_BYTES)
        file.write(content)


def test_the_next_process_finds_what_was_published_the_latest_use_last(tmp_path: Path) -> None:
    first = Directory(tmp_path, FILES, 4)
    assert (first.is_continued, found(first)) == (False, {})
    slots = np.array([3, 0, 1], np.int32)
    first.use(slots)
    first.publish(slots, [OLD, NEW, b""])
    first.use(SLOT - 2)
    first.close()
    second = Directory(tmp_path, FILES, 4)
    assert second.is_continued
    assert [*found(second).items()] == [(3, OLD), (1, b""), (0, NEW)]
    assert second.read(1, 3)[1] == [b""]
    second.withdraw(slots[:2])
    second.use(slots[:1])  # later than all of the process before
    second.publish(slots[:1], [NEW])
    assert [*found(second).items()] == [(1, b""), (3, NEW)]


def test_a_torn_entry_is_absent_whichever_of_its_words_were_written(tmp_path: Path) -> None:
    """Of each step any of the entry's words may be there, in any order."""
    directory = Directory(tmp_path, FILES, 4)
    directory.publish(SLOT, [OLD])
    states = [entry(tmp_path)]
    directory.withdraw(SLOT)
    states.append(entry(tmp_path))
    directory.publish(SLOT, [NEW])
    states.append(entry(tmp_path))
    whole = {states[0]: {2: OLD}, states[2]: {2: NEW}}
    words = range(0, ENTRY_BYTES, 8)
    seen = []
    for before, after in itertools.pairwise(states):
        for which in itertools.product((before, after), repeat=len(words)):
            torn = b"".join(of[at : at + 8] for of, at in zip(which, words, strict=True))
            put_entry(tmp_path, torn)
            named = found(directory)
            assert named in ({}, whole.get(torn))
            seen.append(named)
    assert {2: OLD} in seen
    assert {2: NEW} in seen


@pytest.mark.parametrize("byte", range(ENTRY_BYTES))
def test_an_entry_with_another_byte_names_nothing(tmp_path: Path, byte: int) -> None:
    """Unless the byte is of the time of its use."""
    directory = Directory(tmp_path, FILES, 4)
    directory.publish(SLOT, [b"k" * 36])
    content = bytearray(entry(tmp_path))
    content[byte] ^= 0x10
    put_entry(tmp_path, bytes(content))
    assert found(directory) == ({2: b"k" * 36} if 8 <= byte < 16 else {})


def test_after_it_was_retired_no_process_finds_what_it_had_or_gets(tmp_path: Path) -> None:
    directory = Directory(tmp_path, FILES, 4)
    directory.publish(SLOT, [OLD])
    directory.retire()
    directory.publish(SLOT - 1, [NEW])
    directory.close()
    following = Directory(tmp_path, FILES, 4)
    assert found(following) == {}
    following.publish(SLOT, [NEW])
    following.close()
    assert found(Directory(tmp_path, FILES, 4)) == {2: NEW}


def test_slots_that_become_usable_after_a_reset_have_nothing_from_before(tmp_path: Path) -> None:
    """Page-locking in the background may end after new weights came."""
    arenas = {0: tmp_path / "rank-0.kind.1"}
    left = Directory(tmp_path, {0: arenas[0].name}, 8)
    left.publish(np.arange(8, dtype=np.int32), [b"key %d" % number for number in range(8)])
    left.close()
    manager = LastingManager(make_policy("lru", 8))
    manager.limit_slots(0)
    manager.open(arenas)
    manager.limit_slots(2)
    assert len(manager.readable_slots()) == 2
    manager.reset()
    manager.limit_slots(8)
    assert manager.readable_slots() == {}
    assert manager.adopted_slots == 2


def test_a_key_that_was_stored_again_before_its_slot_was_usable_is_taken_over_once(
    tmp_path: Path,
) -> None:
    """By the process that stored it, and by the next one, which finds it twice."""
    arenas = {0: tmp_path / "rank-0.kind.1"}
    left = Directory(tmp_path, {0: arenas[0].name}, 8)
    left.publish(np.arange(8, dtype=np.int32), [b"key %d" % number for number in range(8)])
    left.close()
    adopted = []
    for usable_slots in ((2, 8), (8,)):
        manager = LastingManager(make_policy("lru", 8))
        manager.limit_slots(0)
        manager.open(arenas)
        for usable in usable_slots:
            manager.limit_slots(usable)
            if b"key 5" not in manager:
                manager.complete_store(manager.prepare_store([b"key 5"]))
        manager.check_integrity()
        assert manager.find([b"key 5"]) < 2, "the slot that was used last"
        adopted.append(manager.adopted_slots)
        manager.close()
    assert adopted == [7, 7]


def test_a_key_that_does_not_fit_is_named_nowhere(tmp_path: Path) -> None:
    directory = Directory(tmp_path, FILES, 4)
    directory.publish(np.array([0, 1], np.int32), [b"k" * (KEY_BYTES + 1), OLD])
    assert found(directory) == {1: OLD}


def test_keys_of_many_lengths_get_no_name_of_another(tmp_path: Path) -> None:
    """Together they are as long as if all were as long as the first."""
    directory = Directory(tmp_path, FILES, 4)
    keys = [b"aa", b"b", b"cc", b"ddd"]
    directory.publish(np.arange(4, dtype=np.int32), keys)
    assert found(directory) == {0: b"aa"}


@pytest.mark.parametrize(
    ("files", "num_slots"), [({0: "rank-0.kind.1"}, 4), ({**FILES, 1: "other"}, 4), (FILES, 5)]
)
def test_a_directory_of_other_arenas_is_replaced(
    tmp_path: Path, files: dict[int, str], num_slots: int
) -> None:
    first = Directory(tmp_path, FILES, 4)
    first.publish(SLOT, [OLD])
    first.close()
    second = Directory(tmp_path, files, num_slots)
    assert not second.is_continued
    assert found(second) == {}
    assert not Directory(tmp_path, FILES, 4).is_continued
    assert [path.name for path in tmp_path.iterdir()] == [DIRECTORY]
    assert (tmp_path / DIRECTORY).stat().st_mode & 0o777 == 0o600


def test_what_a_process_writes_that_still_has_it_reaches_no_other(tmp_path: Path) -> None:
    """An engine that lost its ranks may still run while the next one starts in its place."""
    first = Directory(tmp_path, FILES, 4)
    first.publish(SLOT, [OLD])
    second = Directory(tmp_path, FILES, 4)
    assert not second.is_continued
    first.publish(SLOT - 1, [NEW])
    assert found(second) == {}


def test_a_directory_that_is_about_to_be_closed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of an engine that shuts down give their seat back before its scheduler has ended."""
    first = Directory(tmp_path, FILES, 4)
    first.publish(SLOT, [OLD])
    monkeypatch.setattr(directory, "LOCK_SECONDS", 600.0)
    monkeypatch.setattr(directory.time, "sleep", lambda _: first.close())
    second = Directory(tmp_path, FILES, 4)
    assert second.is_continued
    assert found(second) == {2: OLD}


@pytest.mark.parametrize("damage", [b"", b"?" * 7, b"\0" * file_bytes(4)])
def test_a_file_that_is_no_directory_is_replaced(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / DIRECTORY).write_bytes(damage)
    (tmp_path / f"{DIRECTORY}-new.left").write_bytes(b"of a process that ended while it made one")
    assert not Directory(tmp_path, FILES, 4).is_continued
    assert os.listdir(tmp_path) == [DIRECTORY]


def test_its_time_says_when_it_was_last_used(tmp_path: Path) -> None:
    """Whoever looks for what nobody needs any more finds it at the file."""
    directory = Directory(tmp_path, FILES, 4)
    os.utime(tmp_path / DIRECTORY, (1, 1))
    directory.use(SLOT)
    used = (tmp_path / DIRECTORY).stat().st_mtime
    assert used > 1
    os.utime(tmp_path / DIRECTORY, (1, 1))
    directory.use(SLOT)  # within a minute
    assert (tmp_path / DIRECTORY).stat().st_mtime == 1
