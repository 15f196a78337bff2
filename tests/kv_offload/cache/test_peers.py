"""What an engine reads of another one's slots: all bytes of the key that it leased, or nothing.

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
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache import lasting
from kv_offload.cache.directory import DIRECTORY, HEADER, Directory, open_directory
from kv_offload.cache.key_index import Names, candidates
from kv_offload.cache.peers import PeerDirectories, PeerDirectory
from kv_offload.cache.seats import READER, lock_file
from kv_offload.cache.slots import Slots
from tests.kv_offload.cache.test_pool_killed import (
    NUM_SLOTS,
    WORDS,
    Life,
    act_until_killed,
    content_of,
    live,
)
from tests.support.processes import run_function
from tests.support.slow import rest_is_slow

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
    (pool / OWN.parent).mkdir(exist_ok=True)
    return PeerDirectories({0: pool / OWN})


def only(peers: PeerDirectories) -> PeerDirectory:
    (peer,) = peers.all
    return peer


def look_up(peer: PeerDirectory, keys: list[bytes]) -> tuple[list[bytes], Slots, np.ndarray]:
    """Return which of some keys a peer seems to have, their slots and the words of their names."""
    names = Names.of(keys)
    ((found, rows),) = candidates([peer.contents.index], names.hashes)
    words, slots = names.words[rows], found.astype(np.int32)
    has = peer.contents.have(slots, words)
    return [keys[row] for row in rows[has].tolist()], slots[has], words[has]


def lease(peer: PeerDirectory, keys: list[bytes]) -> tuple[list[bytes], Slots]:
    """Lease what a peer has of some keys; return these and their slots."""
    found, slots, words = look_up(peer, keys)
    good = peer.lease(slots, words)
    return [*compress(found, good.tolist())], slots[good]


def read(peer: PeerDirectory, keys: list[bytes]) -> int:
    """Read what a peer has of some keys, as a rank does, and compare it; return how many there are.

    Word by word, so that its owner may do anything meanwhile.
    """
    leased, slots = lease(peer, keys)
    with (peer.seat / peer.files[0]).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    words = np.frombuffer(memory, np.uint64, NUM_SLOTS * WORDS).reshape(NUM_SLOTS, WORDS)
    for key, slot in zip(leased, slots.tolist(), strict=True):
        assert [int(words[slot, word]) for word in range(WORDS)] == content_of(key).tolist()
    peer.release(slots)
    return len(leased)


def test_only_seats_with_a_byte_in_the_leases_read_and_are_read(tmp_path: Path) -> None:
    make_seat(tmp_path, "seat-63")
    make_seat(tmp_path, "seat-64")
    peers = find(tmp_path)
    assert [peer.seat.name for peer in peers.all] == ["seat-63"]
    peers.close()
    assert not PeerDirectories({0: tmp_path / "seat-64" / OWN.name}).all


def test_whose_seat_was_removed_reads_no_peers(tmp_path: Path) -> None:
    """Somebody empties the pool's folder, and another engine takes the same number."""
    make_seat(tmp_path)
    peers = find(tmp_path)
    assert len(peers.all) == 1
    (tmp_path / OWN.parent / READER).unlink()
    peers.refresh()
    assert not peers.all
    assert lock_file(tmp_path / OWN.parent / READER) is not None
    peers.refresh()
    assert not peers.all


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


following: list[Directory] = []


def adopt_and_rewrite(directory: Directory, words: np.ndarray, folder: Path) -> None:
    """Do it by the next engine, after this one has ended."""
    directory.close()
    following[:] = [Directory(folder, FILES, NUM_SLOTS)]
    assert following[0].is_continued
    rewrite(following[0], words, folder)


def replace(directory: Directory, words: np.ndarray, folder: Path) -> None:
    """Let another engine take over the slots without the directory, which still has a process."""
    assert not Directory(folder, FILES, NUM_SLOTS).is_continued
    words[:3] = 0


def retire(directory: Directory, words: np.ndarray, folder: Path) -> None:
    directory.retire()


def remove(directory: Directory, words: np.ndarray, folder: Path) -> None:
    (folder / DIRECTORY).unlink()


@pytest.mark.parametrize("act", [withdraw, rewrite, adopt_and_rewrite, replace, retire, remove])
def test_what_its_owner_does_before_the_lease_has_it_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Directory, np.ndarray, Path], None],
) -> None:
    """The reader has read the sums and keys, and sets its leases next."""
    directory, words = make_seat(tmp_path)
    peer = only(find(tmp_path))
    leased = lease(peer, KEYS)
    assert leased[1].tolist() == [0, 1, 2]
    peer.release(leased[1])
    names, orders = Names.of(KEYS[:3]), []

    def order() -> None:
        orders.append(0)
        if len(orders) == 2:  # after the sums
            act(directory, words, tmp_path / "seat-0")

    monkeypatch.setattr("kv_offload.cache.peers.order_memory", order)
    good = peer.lease(SLOTS, names.words)
    assert len(orders) >= 4
    assert not good.any()
    assert peer.num_leases == 0
    assert not peer.contents.leases.any()


@pytest.mark.parametrize("act", [withdraw, adopt_and_rewrite, retire])
def test_what_its_owner_does_after_the_lease_leaves_the_slots_alone(
    tmp_path: Path, act: Callable[[Directory, np.ndarray, Path], None]
) -> None:
    directory, words = make_seat(tmp_path)
    peer = only(find(tmp_path))
    _, slots = lease(peer, KEYS)
    act(directory, words, tmp_path / "seat-0")
    if act is adopt_and_rewrite:
        directory = following[-1]
    assert directory.are_leased(np.arange(5, dtype=np.int32)).tolist() == [True] * 3 + [False] * 2
    assert directory.readers_of(slots) == [7]
    peer.release(slots)
    assert not directory.are_leased(slots).any()


def test_what_its_owner_does_to_other_slots_refuses_nothing(tmp_path: Path) -> None:
    directory, _ = make_seat(tmp_path)
    peer = only(find(tmp_path))
    directory.withdraw(SLOTS[:1])
    directory.use(SLOTS)
    directory.publish(SLOTS[:1] + 9, KEYS[9:10])
    assert lease(peer, KEYS)[1].tolist() == [1, 2, 9]


def test_after_a_reset_no_peer_finds_what_an_engine_had_or_gets(tmp_path: Path) -> None:
    directory, _ = make_seat(tmp_path)
    peer = only(find(tmp_path))
    directory.retire()
    directory.publish(SLOTS + 5, KEYS[5:8])
    assert look_up(peer, KEYS)[0] == []
    assert peer.usable_slots == 0
    directory.close()
    next_one = Directory(tmp_path / "seat-0", FILES, NUM_SLOTS)
    assert not next_one.is_continued
    assert next_one.read(0, NUM_SLOTS)[1] == []
    next_one.allow(NUM_SLOTS)
    next_one.publish(SLOTS + 5, KEYS[5:8])
    assert lease(peer, KEYS)[1].tolist() == [5, 6, 7]
    assert peer.usable_slots == NUM_SLOTS


def test_what_was_found_before_a_reset_is_not_read_after_the_next_start(tmp_path: Path) -> None:
    """The reader is stopped between its lookup and its lease."""
    directory, _ = make_seat(tmp_path)
    peer = only(find(tmp_path))
    _, slots, words = look_up(peer, KEYS)
    directory.retire()
    directory.close()
    next_one = Directory(tmp_path / "seat-0", FILES, NUM_SLOTS)
    next_one.allow(NUM_SLOTS)
    assert not peer.lease(slots, words).any()
    assert len(slots) == 3


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
    leased, found = lease(peer, keys)
    slot_of = dict(zip(keys, slots.tolist(), strict=True))
    assert found.tolist() == [slot_of[key] for key in leased]
    assert len(found) >= num_slots - 1
    peer.release(found)
    gone = slots[:2500]
    directory.withdraw(gone)
    _, found_then = lease(peer, keys)
    assert {*found_then.tolist()} == {*found.tolist()} - {*gone.tolist()}
    directory.publish(gone, keys[:2500])
    assert len(lease(peer, keys)[0]) >= num_slots - 1


def test_a_directory_whose_arena_was_removed_is_not_believed(tmp_path: Path) -> None:
    """The next engine of a seat removes arenas of another kind long before it has a directory."""
    make_seat(tmp_path)
    peers = find(tmp_path)
    assert len(peers.all) == 1
    (tmp_path / "seat-0" / FILES[0]).unlink()
    peers.refresh()
    assert peers.all == ()
    peers.close()
    assert find(tmp_path).all == ()


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


def until_killed(process: int, stops: bool) -> Iterator[None]:
    """Yield until a process was killed, once more then; with `stops` it stands still meanwhile."""
    ended = 0
    while not ended:
        ended, status = os.waitpid(process, os.WNOHANG)
        if stops and not ended:
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.001)
        yield
        if stops and not ended:
            os.kill(process, signal.SIGCONT)
            time.sleep(0.001)  # else it may be stopped again before it runs a line
    assert os.WIFSIGNALED(status), "it ended with an error"


def kill_owners(pool: str, stops: bool) -> int:
    """Return how many blocks of owners were read, which follow one another in a seat."""
    board = mmap.mmap(-1, mmap.PAGESIZE)
    seat = Path(pool, "seat-0")
    seat.mkdir()
    chance, accepted = random.Random(7), 0
    peers = find(Path(pool))
    for number in range(40):
        lines = chance.randrange(20, 9000)
        process = os.fork()
        if not process:
            live(seat, 2000 + number, lines, board)
        for _ in until_killed(process, stops):
            for _ in range(3):
                accepted += sum(read(peer, KEYS) for peer in peers.all)
                peers.refresh()
        accepted += sum(read(peer, KEYS) for peer in peers.all)  # what it left
    return accepted


@pytest.mark.parametrize("stops", rest_is_slow([True, False]))
def test_whenever_its_owner_is_killed_or_stands_still_a_reader_has_whole_blocks(
    tmp_path: Path, stops: bool
) -> None:
    """Each owner is killed at a line that a fixed seed draws."""
    assert run_function(kill_owners, tmp_path, stops, forks=False) > 100


def read_and_end(pool: Path, lines: int) -> None:
    """Be a reader until so many lines have run."""

    def act() -> None:
        peers = find(pool)
        while True:
            for peer in peers.all:
                read(peer, KEYS)

    act_until_killed(act, lines, ("cache/peers.py", os.path.basename(__file__)))


def kill_readers(pool: str, stops: bool) -> int:
    """Return how many of the readers that follow one another in a seat left a lease."""
    lasting.READERS_SECONDS = 0.0
    seat = Path(pool, "seat-0")
    seat.mkdir()
    owner = Life(seat, 5, mmap.mmap(-1, mmap.PAGESIZE))
    chance, was_leased = random.Random(8), 0
    all_slots = np.arange(NUM_SLOTS, dtype=np.int32)
    for number in range(600):
        if number >= 30 and was_leased > 3:
            break
        process = os.fork()
        if not process:
            read_and_end(Path(pool), chance.randrange(20, 3000) + number)
        chance.random()
        for _ in until_killed(process, stops):
            for _ in range(5):
                owner.step()
        was_leased += bool(owner.manager.directory.are_leased(all_slots).any())
    for _ in range(200):
        owner.step()
    for slots, _ in owner.planned:
        owner.manager.complete_store(slots, ok=False)
    owner.manager.reset()
    given = [owner.manager.prepare_store([b"%d" % n for n in range(at, at + 24)]) for at in (0, 50)]
    assert sum(map(len, given)) == NUM_SLOTS
    owner.manager.check_integrity()
    return was_leased


@pytest.mark.parametrize("stops", rest_is_slow([True, False]))
def test_whenever_a_reader_is_killed_or_stands_still_its_owner_has_all_slots_in_the_end(
    tmp_path: Path, stops: bool
) -> None:
    """Each reader is killed at a line that a fixed seed draws."""
    assert run_function(kill_readers, tmp_path, stops, forks=False) > 3


def test_what_an_owner_that_was_killed_in_a_reset_had_is_not_read(tmp_path: Path) -> None:
    """It may not have come to empty the index."""
    make_seat(tmp_path)
    peer = only(find(tmp_path))
    assert read(peer, KEYS) == 3
    with (tmp_path / "seat-0" / DIRECTORY).open("r+b") as file:
        file.seek(HEADER.fields["is_retired"][1])
        file.write(b"\1")
    assert read(peer, KEYS) == 0
