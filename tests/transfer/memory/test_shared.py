"""Memory of several processes; every peer here is a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from kv_swap.errors import PinnedMemoryError
from kv_swap.memory import shared
from kv_swap.memory.arena import HostArena
from kv_swap.memory.shared import SharedMemory

from tests.support.registrars import PAGE, policy_of, usable_node
from tests.support.waiting import wait_until

SLOTS, SLOT_BYTES = 6, PAGE + 16
NBYTES = SLOTS * SLOT_BYTES
ROUNDED = -(-NBYTES // PAGE) * PAGE

PRELUDE = f"""
import sys
from kv_swap.memory.arena import HostArena
from kv_swap.memory.shared import SharedMemory
name, nbytes = sys.argv[1], {NBYTES}
def arena(memory):
    return HostArena({SLOTS}, {SLOT_BYTES}, register=None, shared=memory)
def say(*words):
    print(*words, flush=True)
def hear(word):
    assert sys.stdin.readline().strip() == word
"""
PEER = """
with SharedMemory.attach(name, nbytes, 120) as memory:
    mine = arena(memory).view()
say("read", *mine[:, 7])
hear("write")
mine[4] = 99
say("wrote")
hear("end")
"""
CREATOR = """
memory = SharedMemory.create(name, nbytes, 1)
mine = arena(memory).view()
mine[:] = 7
say("created")
hear("end")
"""


class Peer:
    """A process that runs a script with the name as its argument."""

    def __init__(self, script: str, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, name],
            env={**os.environ, "PYTHONPATH": str(Path(shared.__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)

    def end(self) -> None:
        self.say("end")
        assert self.process.wait(120) == 0


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def peers(name: str) -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.process.kill()
        peer.process.communicate()


def traces(name: str) -> list[str]:
    """Return what other processes could still find of the memory."""
    files = [path.name for path in Path("/dev/shm").iterdir()]
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in (*files, *sockets) if name in line]


def wait_until_all_have_it(name: str) -> None:
    """Nobody can find the memory then, so nobody has to remove it."""
    wait_until(lambda: not traces(name), "the memory is still offered")


# -- two processes -----------------------------------------------------------------------------


def test_all_processes_see_each_other_s_bytes(name, peers):
    with SharedMemory.create(name, NBYTES, 2) as memory:
        view = HostArena(SLOTS, SLOT_BYTES, register=None, shared=memory).view()
        assert view.shape == (SLOTS, SLOT_BYTES)
        assert not view.any()
        view[:] = [[i] for i in range(SLOTS)]
        assert os.fstat(memory.fileno()).st_size == ROUNDED
        peers.append(Peer(PEER, name))
        assert peers[0].hear() == "read 0 1 2 3 4 5"
        peers.append(Peer(PEER, name))
        wait_until_all_have_it(name)
    assert peers[1].hear() == "read 0 1 2 3 4 5"
    peers[0].say("write")
    assert peers[0].hear() == "wrote"
    assert view[:, 7].tolist() == [0, 1, 2, 3, 99, 5]
    peers[0].end()
    assert (view[4] == 99).all()


def test_a_peer_may_come_before_the_creator(name, monkeypatch):
    ask, answers = shared._ask, Queue[int | None]()

    def note(name: str) -> int | None:
        answers.put(found := ask(name))
        return found

    monkeypatch.setattr(shared, "_ask", note)
    with ThreadPoolExecutor(1) as threads:
        peer = threads.submit(SharedMemory.attach, name, NBYTES, 120)
        assert answers.get(timeout=120) is None
        with SharedMemory.create(name, NBYTES, 1), peer.result(120):
            wait_until_all_have_it(name)


@pytest.mark.parametrize("attached", [True, False])
def test_memory_outlives_a_killed_creator_only_where_it_is_attached(attached, name, peers):
    peers.append(Peer(CREATOR, name))
    assert peers[0].hear() == "created"
    assert traces(name) != []
    if attached:
        with SharedMemory.attach(name, NBYTES, 120) as memory:
            view = HostArena(SLOTS, SLOT_BYTES, register=None, shared=memory).view()
        wait_until_all_have_it(name)
    peers[0].kill()
    assert traces(name) == []
    if attached:
        assert (view == 7).all()
        view[0] = 1
    SharedMemory.create(name, NBYTES, 1).close()


# -- what is refused ---------------------------------------------------------------------------


def test_more_than_the_machine_has_is_refused_before_anything_is_touched(name):
    nbytes = 1 << 50
    with pytest.raises(PinnedMemoryError, match=f"cannot share {nbytes} bytes") as caught:
        SharedMemory.create(name, nbytes, 1)
    assert "ulimit -l" in str(caught.value)
    assert "smaller pool" in str(caught.value)
    assert traces(name) == []


def test_a_name_that_is_taken(name):
    with (
        SharedMemory.create(name, NBYTES, 1),
        pytest.raises(PinnedMemoryError, match="a name of its own") as caught,
    ):
        SharedMemory.create(name, NBYTES, 1)
    assert name in str(caught.value)
    SharedMemory.create(name, NBYTES, 1).close()
    with pytest.raises(PinnedMemoryError, match=r"AF_UNIX path too long.*less than 90 letters"):
        SharedMemory.create(name.rjust(110, "n"), NBYTES, 1)
    with SharedMemory.create(name.rjust(89, "n"), NBYTES, 1):
        SharedMemory.attach(name.rjust(89, "n"), NBYTES, 120).close()


def test_another_size_is_refused(name):
    with SharedMemory.create(name, NBYTES, 1) as memory:
        with pytest.raises(PinnedMemoryError, match=f"has {ROUNDED} bytes, this process wants"):
            SharedMemory.attach(name, NBYTES + PAGE, 120)
        with pytest.raises(PinnedMemoryError, match=f"make it of {2 * SLOT_BYTES}"):
            HostArena(2, SLOT_BYTES, register=None, shared=memory)


def test_a_closed_handle_offers_no_longer(name):
    memory = SharedMemory.create(name, NBYTES, 1)
    memory.close()
    memory.close()
    assert traces(name) == []
    with pytest.raises(PinnedMemoryError, match=f"{name}.*within 0 s.*see its log"):
        SharedMemory.attach(name, NBYTES, 0)
    assert "kv-swap-share" not in [thread.name for thread in threading.enumerate()]
    with SharedMemory.create(name, NBYTES, 0):
        assert traces(name) == [], "without peers nothing is offered"


def test_nobody_can_shrink_the_memory(name):
    """A touch beyond the end of a file would end the process with SIGBUS."""
    with SharedMemory.create(name, NBYTES, 0) as memory:
        for size in (0, 2 * ROUNDED):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fileno(), size)


def test_other_users_get_nothing(name, monkeypatch):
    with SharedMemory.create(name, NBYTES, 1):
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(120)
            connection.connect(shared._address(name))
            assert socket.recv_fds(connection, 1, 1)[:2] == (b"", [])
        assert shared._ask(name) is None
        monkeypatch.undo()
        SharedMemory.attach(name, NBYTES, 120).close()
        wait_until_all_have_it(name)


def test_memory_of_other_users_is_not_taken(name, monkeypatch):
    """Any user may have taken the name first, and could read what is stored there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(shared._address(name))
        listener.listen()
        theirs = os.memfd_create("theirs")

        def offer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                socket.send_fds(connection, [b"m"], [theirs])
                connection.recv(1)

        thread = threading.Thread(target=offer)
        thread.start()
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        assert shared._ask(name) is None
        thread.join(120)
        os.close(theirs)


@pytest.mark.parametrize("has_it", [False, True])
def test_a_peer_that_ends_in_between_is_not_counted(name, has_it):
    with SharedMemory.create(name, NBYTES, 1):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(shared._address(name))
            if has_it:
                _, (fd,), *_ = socket.recv_fds(connection, 1, 1)
                os.close(fd)
        with SharedMemory.attach(name, NBYTES, 120) as handle:
            mapped = mmap.mmap(handle.fileno(), ROUNDED)
            assert mapped[:4] == bytes(4)
            mapped.close()
        wait_until_all_have_it(name)


def test_a_peer_that_stalls_asks_again(name, monkeypatch):
    """The creator gives it up. It keeps nothing of the first answer: that would hold the memory."""
    received, recv_fds = [], socket.recv_fds

    def stall_once(connection: socket.socket, *sizes: int) -> Any:
        message = recv_fds(connection, *sizes)
        received.append(message)
        if len(received) == 1:
            connection.settimeout(120)
            assert connection.recv(1) == b""  # the creator has hung up
        return message

    monkeypatch.setattr(shared, "_ANSWER_SECONDS", 0.2)
    with SharedMemory.create(name, NBYTES, 1):
        monkeypatch.setattr(shared.socket, "recv_fds", stall_once)
        with SharedMemory.attach(name, NBYTES, 120) as handle:
            wait_until_all_have_it(name)
            assert len(received) > 1
            opened = [_file(int(fd)) for fd in os.listdir("/proc/self/fd")]
            assert opened.count(_file(handle.fileno())) == 2


def _file(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:  # the listing's own
        return None
    return found.st_dev, found.st_ino


# -- NUMA --------------------------------------------------------------------------------------


def test_each_part_comes_from_the_node_that_was_asked_for(name):
    """The second of two parts, of 3 and 4 pages; every mapping of the file sees it."""
    node = usable_node()
    with SharedMemory.create(name, 7 * PAGE, 0) as memory:
        assert memory.prefer_node(node, 1, 2)
        for offset, expected in ((0, False), (3 * PAGE, True)):
            with mmap.mmap(memory.fileno(), PAGE, flags=mmap.MAP_SHARED, offset=offset) as mapped:
                address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
                assert (policy_of(address) == f"prefer:{node}") is expected
        assert memory.prefer_node(node, 1, 20), "a part without a page"
        assert not memory.prefer_node(1023, 0, 2), "a node that does not exist"
