"""Memory of several processes; every peer here is a process of its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_swap.errors import PinnedMemoryError
from kv_swap.memory import shared
from kv_swap.memory.arena import HostArena
from kv_swap.memory.shared import SharedMemory

from tests.support.registrars import PAGE, policy_of, usable_node

SLOTS, SLOT_BYTES = 6, PAGE + 16
NBYTES = SLOTS * SLOT_BYTES
ROUNDED = -(-NBYTES // PAGE) * PAGE

PRELUDE = f"""
import sys
from kv_swap.memory.arena import HostArena
from kv_swap.memory.shared import SharedMemory
nbytes = {NBYTES}
def arena(memory):
    return HostArena({SLOTS}, {SLOT_BYTES}, register=None, shared=memory)
def say(*words):
    print(*words, flush=True)
def hear(word):
    assert sys.stdin.readline().strip() == word
"""
PEER = """
with SharedMemory.attach(sys.argv[1], nbytes) as memory:
    mine = arena(memory).view()
say("read", *mine[:, 7])
hear("write")
mine[4] = 99
say("wrote")
hear("end")
"""
CREATOR = """
memory = SharedMemory.create(nbytes)
mine = arena(memory).view()
mine[:] = 7
say(memory.name)
hear("end")
"""
OTHER_USER = """
import os
from kv_swap.errors import PinnedMemoryError
os.setuid(65534)
try:
    SharedMemory.attach(sys.argv[1], nbytes)
except PinnedMemoryError:
    say("refused")
"""


class Peer:
    """A process that runs a script with these arguments."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, *arguments],
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
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.process.kill()
        peer.process.communicate()


# -- two processes -----------------------------------------------------------------------------


def test_all_processes_see_each_other_s_bytes(peers):
    with SharedMemory.create(NBYTES) as memory:
        view = HostArena(SLOTS, SLOT_BYTES, register=None, shared=memory).view()
        assert view.shape == (SLOTS, SLOT_BYTES)
        assert not view.any()
        view[:] = [[i] for i in range(SLOTS)]
        assert os.fstat(memory.fileno()).st_size == ROUNDED
        for _ in range(2):
            peers.append(Peer(PEER, memory.name))
            assert peers[-1].hear() == "read 0 1 2 3 4 5"
    peers[0].say("write")
    assert peers[0].hear() == "wrote"
    assert view[:, 7].tolist() == [0, 1, 2, 3, 99, 5]
    peers[0].end()
    assert (view[4] == 99).all()


@pytest.mark.parametrize("attached", [True, False])
def test_memory_outlives_a_killed_creator_only_where_it_is_attached(attached, peers):
    peers.append(Peer(CREATOR))
    name = peers[0].hear()
    if attached:
        with SharedMemory.attach(name, NBYTES) as memory:
            view = HostArena(SLOTS, SLOT_BYTES, register=None, shared=memory).view()
    peers[0].kill()
    with pytest.raises(PinnedMemoryError, match="has ended"):
        SharedMemory.attach(name, NBYTES)
    if attached:
        assert (view == 7).all()
        view[0] = 1


# -- what is refused ---------------------------------------------------------------------------


def test_more_than_the_machine_has_is_refused_before_anything_is_touched():
    nbytes = 1 << 50
    with pytest.raises(PinnedMemoryError, match=f"cannot share {nbytes} bytes") as caught:
        SharedMemory.create(nbytes)
    assert "ulimit -l" in str(caught.value)
    assert "smaller pool" in str(caught.value)


def test_another_size_is_refused():
    with SharedMemory.create(NBYTES) as memory:
        with pytest.raises(PinnedMemoryError, match=f"has {ROUNDED} bytes, this process wants"):
            SharedMemory.attach(memory.name, NBYTES + PAGE)
        with pytest.raises(PinnedMemoryError, match=f"make it of {2 * SLOT_BYTES}"):
            HostArena(2, SLOT_BYTES, register=None, shared=memory)


def test_another_file_of_the_same_number_is_refused():
    """As in another container, whose processes have numbers of their own."""
    with SharedMemory.create(NBYTES) as memory, SharedMemory.create(NBYTES) as other:
        name, fd = memory.name, memory.fileno()
        SharedMemory.attach(name, NBYTES).close()
        os.dup2(other.fileno(), fd)
        with pytest.raises(PinnedMemoryError, match="in another container"):
            SharedMemory.attach(name, NBYTES)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_get_nothing(peers):
    with SharedMemory.create(NBYTES) as memory:
        peers.append(Peer(OTHER_USER, memory.name))
        assert peers[0].hear() == "refused"
        SharedMemory.attach(memory.name, NBYTES).close()


def test_a_closed_handle_is_closed_once():
    memory = SharedMemory.create(NBYTES)
    name = memory.name
    memory.close()
    with SharedMemory.create(NBYTES):
        memory.close()
        with pytest.raises(PinnedMemoryError):
            SharedMemory.attach(name, NBYTES)


def test_nobody_can_shrink_the_memory():
    """A touch beyond the end of a file would end the process with SIGBUS."""
    with SharedMemory.create(NBYTES) as memory:
        for size in (0, 2 * ROUNDED):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fileno(), size)


# -- NUMA --------------------------------------------------------------------------------------


def test_each_part_comes_from_the_node_that_was_asked_for():
    """The second of two parts, of 3 and 4 pages; every mapping of the file sees it."""
    node = usable_node()
    with SharedMemory.create(7 * PAGE) as memory:
        assert memory.prefer_node(node, 1, 2)
        for offset, expected in ((0, False), (3 * PAGE, True)):
            with mmap.mmap(memory.fileno(), PAGE, flags=mmap.MAP_SHARED, offset=offset) as mapped:
                address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
                assert (policy_of(address) == f"prefer:{node}") is expected
        assert memory.prefer_node(node, 1, 20), "a part without a page"
        assert not memory.prefer_node(1023, 0, 2), "a node that does not exist"
