"""What an engine reads of another one's slots: all bytes of the key that it asked for, or nothing.

Owners are real processes where one is killed or stopped, and real directories everywhere.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache.directory import DIRECTORY, HEADER, Directory, open_directory
from kv_offload.cache.peers import PeerDirectories, PeerDirectory
from tests.kv_offload.cache.test_pool_killed import NUM_SLOTS, WORDS, content_of, live

KEYS = [b"key %d" % number for number in range(46)]
OWN = Path("seat-7", "rank-0.kind.own")
SLOTS = np.arange(3, dtype=np.int32)
FILES = {0: "rank-0.kind.peer"}


def make_seat(pool: Path, name: str = "seat-0", kind: str = "kind") -> tuple[Directory, np.ndarray]:
    """Make the seat of an engine that has three keys; return its directory and its words."""
    seat = pool / name
    seat.mkdir()
    file = seat / f"rank-0.{kind}.peer"
    file.write_bytes(bytes(NUM_SLOTS * WORDS * 8))
    with file.open("r+b") as opened:
        words = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint64).reshape(NUM_SLOTS, WORDS)
    directory = Directory(seat, {0: file.name}, NUM_SLOTS)
    for slot, key in enumerate(KEYS[:3]):
        words[slot] = content_of(key)
    directory.publish(SLOTS, KEYS[:3])
    return directory, words


def find(pool: Path) -> PeerDirectories:
    return PeerDirectories({0: pool / OWN})


def only(peers: PeerDirectories) -> PeerDirectory:
    (peer,) = peers.all
    return peer


def read(peer: PeerDirectory, keys: list[bytes]) -> int:
    """Copy what a peer has of some keys, as a rank does, and compare it; return how many there are.

    Word by word, so that its owner may do anything meanwhile.
    """
    arena = peer.arena(0, NUM_SLOTS, WORDS * 8)
    claim = peer.claim(keys)
    if arena is None:
        return 0
    words = arena.view(np.uint64)
    copies = [[int(words[slot, word]) for word in range(WORDS)] for slot in claim.slots.tolist()]
    good = peer.still_holds(claim)
    for row, copied, ok in zip(claim.rows.tolist(), copies, good.tolist(), strict=True):
        if ok:
            assert copied == content_of(keys[row]).tolist()
    return int(good.sum())


def test_peers_are_the_other_seats_whose_arenas_are_alike(tmp_path: Path) -> None:
    make_seat(tmp_path)
    make_seat(tmp_path, "seat-1", "other")
    make_seat(tmp_path, "seat-7")
    make_seat(tmp_path, "seat-12")
    (tmp_path / "seat-3").mkdir()
    (tmp_path / "seat-4").mkdir()
    (tmp_path / "seat-4" / DIRECTORY).write_bytes(b"?" * 100)
    peers = find(tmp_path)
    assert [peer.seat.name for peer in peers.all] == ["seat-0", "seat-12"]
    assert [read(peer, KEYS) for peer in peers.all] == [3, 3]
    make_seat(tmp_path, "seat-2")
    peers.refresh()
    assert [peer.seat.name for peer in peers.all] == ["seat-0", "seat-2", "seat-12"]


def withdraw(directory: Directory, words: np.ndarray, folder: Path) -> None:
    directory.withdraw(SLOTS)


def rewrite(directory: Directory, words: np.ndarray, folder: Path) -> None:
    """Store other keys, and then the same ones: all is as before, but was not meanwhile."""
    for keys in (KEYS[5:8], KEYS[:3]):
        directory.withdraw(SLOTS)
        words[:3] = [content_of(key) for key in keys]
        directory.publish(SLOTS, keys)


def adopt_and_rewrite(directory: Directory, words: np.ndarray, folder: Path) -> None:
    """Do it by the next engine, after this one has ended."""
    directory.close()
    following = Directory(folder, FILES, NUM_SLOTS)
    assert following.is_continued
    rewrite(following, words, folder)


def replace(directory: Directory, words: np.ndarray, folder: Path) -> None:
    """Let another engine take over the slots without the directory, which still has a process."""
    assert not Directory(folder, FILES, NUM_SLOTS).is_continued
    words[:3] = 0


def retire(directory: Directory, words: np.ndarray, folder: Path) -> None:
    directory.retire()


def remove(directory: Directory, words: np.ndarray, folder: Path) -> None:
    (folder / DIRECTORY).unlink()


@pytest.mark.parametrize("act", [withdraw, rewrite, adopt_and_rewrite, replace, retire, remove])
def test_what_its_owner_does_during_a_copy_has_it_refused(
    tmp_path: Path, act: Callable[[Directory, np.ndarray, Path], None]
) -> None:
    directory, words = make_seat(tmp_path)
    peer = only(find(tmp_path))
    claim = peer.claim(KEYS)
    assert claim.rows.tolist() == [0, 1, 2]
    assert peer.still_holds(claim).all()
    act(directory, words, tmp_path / "seat-0")
    assert not peer.still_holds(claim).any()


def test_what_its_owner_does_to_other_slots_refuses_nothing(tmp_path: Path) -> None:
    directory, _ = make_seat(tmp_path)
    peer = only(find(tmp_path))
    claim = peer.claim(KEYS)
    directory.withdraw(SLOTS[:1])
    directory.use(SLOTS)
    directory.publish(SLOTS[:1] + 9, KEYS[9:10])
    assert peer.still_holds(claim).tolist() == [False, True, True]


def test_after_a_reset_no_peer_finds_what_an_engine_had_or_gets(tmp_path: Path) -> None:
    directory, _ = make_seat(tmp_path)
    peer = only(find(tmp_path))
    directory.retire()
    directory.publish(SLOTS + 5, KEYS[5:8])
    assert read(peer, KEYS) == 0
    directory.close()
    following = Directory(tmp_path / "seat-0", FILES, NUM_SLOTS)
    following.publish(SLOTS + 5, KEYS[5:8])
    assert [len(peer.claim(KEYS).rows), peer.claim(KEYS).slots.tolist()] == [3, [5, 6, 7]]


@pytest.mark.parametrize("damage", ["removed", "cut off"])
def test_an_arena_that_is_gone_brings_nothing(tmp_path: Path, damage: str) -> None:
    """The kernel would end a process that touches what was cut off."""
    make_seat(tmp_path)
    peer = only(find(tmp_path))
    assert read(peer, KEYS) == 3
    arena = tmp_path / "seat-0" / FILES[0]
    if damage == "removed":
        arena.unlink()
    else:
        os.truncate(arena, 8)
    assert read(peer, KEYS) == 0


def test_what_was_removed_is_let_go_of(tmp_path: Path) -> None:
    directory, _ = make_seat(tmp_path)
    peers = find(tmp_path)
    directory.close()
    (tmp_path / "seat-0" / DIRECTORY).unlink()
    peers.refresh()
    assert peers.all == ()


def test_every_key_is_found_where_many_have_one_bucket(tmp_path: Path) -> None:
    """Of thousands that are published at once, some do; keys of several lengths are among them."""
    chance = random.Random(3)
    num_slots = 5000
    keys = [chance.randbytes(20 if number % 3 else 36) for number in range(num_slots)]
    (tmp_path / "seat-0").mkdir()
    (tmp_path / "seat-0" / FILES[0]).touch()
    directory = Directory(tmp_path / "seat-0", FILES, num_slots)
    slots = np.array(chance.sample(range(num_slots), num_slots), np.int32)
    directory.publish(slots, keys)
    peer = only(find(tmp_path))
    claim = peer.claim(keys)
    assert claim.slots.tolist() == slots[claim.rows].tolist()
    assert len(claim.rows) >= num_slots - 1
    gone = slots[:2500]
    directory.withdraw(gone)
    assert {*peer.claim(keys).slots.tolist()} == {*claim.slots.tolist()} - {*gone.tolist()}
    directory.publish(gone, keys[:2500])
    assert len(peer.claim(keys).rows) >= num_slots - 1


def test_a_directory_whose_arena_was_removed_is_not_believed(tmp_path: Path) -> None:
    """The next engine of a seat removes arenas of another kind long before it has a directory."""
    make_seat(tmp_path)
    peers = find(tmp_path)
    assert peers.have(KEYS[:3]).all()
    (tmp_path / "seat-0" / FILES[0]).unlink()
    peers.refresh()
    assert not peers.have(KEYS[:3]).any()
    assert not find(tmp_path).all


MARKS = """
import os, sys
from pathlib import Path
import numpy as np
from kv_offload.cache.directory import open_directory
contents = open_directory(Path(sys.argv[1]))
slots = np.arange(0, contents.num_slots, 1000, np.int32)
print(flush=True)
while os.getppid() == int(sys.argv[2]):
    contents.mark(slots)
    slots = (slots + 1) % contents.num_slots
"""


def test_an_owner_takes_marks_while_peers_make_some(tmp_path: Path) -> None:
    """Bytes that change while they are counted must not end a step."""
    directory = Directory(tmp_path, FILES, 100_000)
    words = [sys.executable, "-c", MARKS, str(tmp_path), str(os.getpid())]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        taken = 0
        while taken < 1_000_000:
            assert process.poll() is None
            taken += len(directory.take_marks())
    finally:
        process.kill()
        process.communicate()


def test_few_marks_are_taken_at_once_but_all_in_the_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kv_offload.cache.directory.MARKS_AT_ONCE", 4)
    directory = Directory(tmp_path, FILES, 16)
    contents = open_directory(tmp_path)
    assert contents is not None
    contents.mark(np.arange(10, dtype=np.int32))
    taken = [directory.take_marks().tolist() for _ in range(2)]
    contents.mark(np.arange(4, dtype=np.int32))
    taken += [directory.take_marks().tolist() for _ in range(3)]
    assert taken == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3], []]


@pytest.mark.parametrize("stops", [False, True])
def test_whenever_its_owner_is_killed_or_stands_still_a_reader_has_whole_blocks(
    tmp_path: Path, stops: bool
) -> None:
    """Owners follow one another in a seat, each killed at a line that a fixed seed draws."""
    board = mmap.mmap(-1, mmap.PAGESIZE)
    seat = tmp_path / "seat-0"
    seat.mkdir()
    chance, accepted = random.Random(7), 0
    peers = find(tmp_path)
    for number in range(40):
        lines = chance.randrange(20, 9000)
        process = os.fork()
        if not process:
            live(seat, 2000 + number, lines, board)
        ended = 0
        while not ended:
            ended, status = os.waitpid(process, os.WNOHANG)
            if stops and not ended:
                os.kill(process, signal.SIGSTOP)
                time.sleep(0.001)
            for _ in range(3):
                accepted += sum(read(peer, KEYS) for peer in peers.all)
                peers.refresh()
            if stops and not ended:
                os.kill(process, signal.SIGCONT)
        assert os.WIFSIGNALED(status), f"owner {number} ended with an error"
        accepted += sum(read(peer, KEYS) for peer in peers.all)  # what it left
    assert accepted > 100


def test_what_an_owner_that_was_killed_in_a_reset_had_is_not_read(tmp_path: Path) -> None:
    """It may not have come to empty the index."""
    make_seat(tmp_path)
    peer = only(find(tmp_path))
    assert read(peer, KEYS) == 3
    with (tmp_path / "seat-0" / DIRECTORY).open("r+b") as file:
        file.seek(HEADER.fields["generation"][1])
        file.write(b"another")
    assert read(peer, KEYS) == 0
