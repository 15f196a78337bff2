from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_swap.errors import PinnedMemoryError
from kv_swap.memory import mapping, registration
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import Mapping
from kv_swap.memory.registration import MemoryRoom, choose_piece_bytes
from kv_swap.memory.shared import SharedMemory

from tests.support.children import passes_in_a_child
from tests.support.processes import run_code
from tests.support.registrars import PAGE, GatedRegistrar, Registrar, is_mapped, resident_bytes
from tests.support.waiting import wait_until

PIECE = 4 * PAGE


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(registration, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(registration, "BATCH_BYTES", PIECE)
    monkeypatch.setattr(registration, "POPULATE_BYTES", 2 * PAGE)
    return PIECE


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two threads at least, also on a machine of one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def pinning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-swap-pin"]


def after_pages(act: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have threads call `act` with the offset and bytes of a range that has its pages now."""
    original = Mapping.populate

    def populate(mapping: Mapping, offset: int, nbytes: int) -> None:
        original(mapping, offset, nbytes)
        act(offset, nbytes)

    monkeypatch.setattr(Mapping, "populate", populate)


def hold(piece: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep the thread of a piece from registering it until the event is set."""
    gate = threading.Event()

    def wait(offset: int, nbytes: int) -> None:
        assert offset // PIECE != piece or gate.wait(120)

    after_pages(wait, monkeypatch)
    return gate


# -- memory and its lifetime -------------------------------------------------------------------


def test_arena_is_exact_and_zero_and_takes_no_memory_unless_it_is_registered():
    arena = HostArena(7, 48, register=None, background=True)
    view = arena.view()
    assert (view.shape, view.dtype, arena.nbytes) == ((7, 48), np.uint8, 7 * 48)
    assert view.ctypes.data == arena.address
    assert resident_bytes(arena.address, arena.nbytes) == 0
    assert arena.wait_ready(0)
    assert not view.any()
    view[3] = 9
    assert (arena.view()[3] == 9).all()


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "message"),
    [
        (1 << 40, 1 << 20, f"cannot map {1 << 60} bytes .*ulimit -l"),
        (1 << 60, 1 << 20, f"cannot map {1 << 80} bytes "),
        (0, 16, "at least 1 slot"),
        (16, 0, "at least 1 slot"),
    ],
)
def test_memory_that_cannot_be_had(num_slots, slot_bytes, message):
    with pytest.raises(PinnedMemoryError, match=message):
        HostArena(num_slots, slot_bytes, register=None)


def test_memory_lives_as_long_as_any_view():
    registrar = Registrar()
    arena = HostArena(4, PAGE, register=registrar)
    derived = arena.view()[1:3].view(np.int32).reshape(-1)[::2]
    del arena
    gc.collect()
    assert registrar.live
    derived[:] = 7
    del derived
    gc.collect()
    registrar.assert_undone()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_leaves_the_memory_alone(small_pieces):
    registrar = Registrar()
    arena = HostArena(9, PAGE, register=registrar)
    arena.view()[:] = 5

    def drop() -> None:
        nonlocal arena
        assert not is_mapped(arena.address)
        assert len(registrar.live) == 3
        del arena
        gc.collect()
        assert len(registrar.live) == 3

    assert passes_in_a_child(drop)
    assert (arena.view() == 5).all()


# -- registration ------------------------------------------------------------------------------


def test_registers_every_byte_in_bounded_pieces(small_pieces):
    registrar = Registrar()
    arena = HostArena(9, PAGE, register=registrar)
    assert sorted(registrar.calls) == [
        (arena.address, PIECE),
        (arena.address + PIECE, PIECE),
        (arena.address + 2 * PIECE, PAGE),
    ]
    assert arena.ready_slots == 9
    assert arena.wait_ready(0)


@pytest.mark.parametrize(
    ("slot_bytes", "pages_of_piece"),
    [
        (PAGE, 4096),
        (2 << 20, 4096),
        (3 * PAGE, 4095),
        (PAGE + 16, 257 * 15),
        (20 << 20, 5 * 1024),  # a slot of its own
        (300 << 20, 4096),  # a slot lies in several
    ],
)
def test_no_slot_lies_in_two_pieces_where_it_fits(slot_bytes, pages_of_piece):
    piece_bytes = choose_piece_bytes(slot_bytes)
    assert piece_bytes == pages_of_piece * PAGE
    assert piece_bytes % slot_bytes == 0 or slot_bytes > 256 << 20


@pytest.mark.parametrize("failing_piece", [0, 2])
def test_partial_registration_is_undone(failing_piece, small_pieces):
    """Also of the first piece of an arena that is registered in the background."""
    start = failing_piece * PIECE
    registrar = Registrar(failing_offset=start)
    with pytest.raises(PinnedMemoryError) as caught:
        HostArena(12, PAGE, register=registrar, background=not failing_piece)
    for part in (
        f"page-lock {12 * PAGE} bytes",
        f"bytes {start} to {start + PIECE} failed with cudaErrorMemoryAllocation",
        "ulimit -l",
        "smaller pool",
    ):
        assert part in str(caught.value)
    assert len(registrar.calls) == failing_piece
    registrar.assert_undone()
    wait_until(lambda: not pinning_threads())


def test_memory_that_cannot_be_unregistered_stays_mapped(monkeypatch):
    registrar = Registrar()

    def refuse(address: int) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(registrar, "unregister", refuse)
    logged: list[str] = []
    monkeypatch.setattr(mapping.logger, "exception", lambda text, *_: logged.append(text))
    arena = HostArena(1, PAGE, register=registrar)
    address = arena.address
    del arena
    gc.collect()
    assert is_mapped(address)
    assert "cannot unregister" in logged[0]


# -- in the background -------------------------------------------------------------------------


@pytest.mark.usefixtures("two_threads")
def test_slots_become_ready_in_order_of_their_number(small_pieces, monkeypatch):
    gate = hold(1, monkeypatch)
    registrar = Registrar()
    arena = HostArena(18, PAGE, register=registrar, background=True)
    arena.view()[:4] = 1
    wait_until(lambda: len(registrar.live) == 4)
    assert not arena.wait_ready(0)
    assert arena.ready_slots == 4, "slots from 8 on are locked, but 4 to 7 are not"
    gate.set()
    assert arena.wait_ready(120)
    assert arena.ready_slots == 18
    assert threading.main_thread() in registrar.threads
    assert len(registrar.threads) > 1
    assert sum(registrar.live.values()) == 18 * PAGE


@pytest.mark.parametrize("background", [True, False])
def test_the_driver_is_left_alone_after_each_registration_in_the_background(
    background, small_pieces
):
    times: list[tuple[float, float]] = []

    class Slow(Registrar):
        def register(self, address: int, nbytes: int) -> None:
            began = time.monotonic()
            time.sleep(0.005)
            super().register(address, nbytes)
            times.append((began, time.monotonic()))

    arena = HostArena(40, PAGE, register=Slow(), background=background)
    assert arena.wait_ready(120)
    assert len(times) == 10
    rest = registration.REST if background else 0
    for (began, ended), (next_began, _) in itertools.pairwise(sorted(times[1:])):
        assert next_began - ended >= rest * (ended - began)


def test_a_thread_takes_several_pieces_at_once_and_looks_at_free_memory_once_for_all(
    monkeypatch, small_pieces
):
    """A look at every piece would take the interpreter's time from the engine's steps."""
    monkeypatch.setattr(registration, "BATCH_BYTES", 4 * PIECE + PAGE)
    looks: list[float] = []

    def read() -> tuple[int, str]:
        looks.append(time.monotonic())
        return 1 << 50, "a played host"

    registrar = Registrar()
    room = MemoryRoom(read, 0)
    arena = HostArena(41, PAGE, register=registrar, background=True, room=room)
    assert arena.ready_slots >= 16, "the constructor locks a batch"
    assert arena.wait_ready(120)
    assert sorted(registrar.live.values()) == [PAGE, *[PIECE] * 10]
    assert len(looks) == 2


@pytest.mark.usefixtures("two_threads")
def test_a_piece_that_fails_ends_its_batch(monkeypatch, small_pieces):
    monkeypatch.setattr(registration, "BATCH_BYTES", 4 * PIECE)
    registrar = Registrar(failing_offset=5 * PIECE)
    arena = HostArena(48, PAGE, register=registrar, background=True)
    assert not arena.wait_ready(120)
    assert arena.ready_slots == 20
    assert sum(registrar.live.values()) == 20 * PAGE
    assert resident_bytes(arena.address, arena.nbytes) == 20 * PAGE


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_progress_and_the_end_are_logged(seconds, small_pieces, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kv_swap")
    monkeypatch.setattr(registration, "PROGRESS_SECONDS", seconds)
    arena = HostArena(16, PAGE, register=Registrar(), background=True)
    assert arena.wait_ready(120)
    assert f"page-locked {16 * PAGE} bytes from any NUMA node" in caplog.text
    progress = re.search(r"0\.0 GiB after \d+ s; the pool grows meanwhile", caplog.text)
    assert bool(progress) == (not seconds)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("last", [False, True])
def test_a_failure_in_the_background_caps_the_arena(last, small_pieces, caplog, monkeypatch):
    """Also if the piece that fails is the last one: those behind it are given back."""
    registrar = Registrar(failing_offset=2 * PIECE)
    gate = hold(2, monkeypatch) if last else None
    arena = HostArena(40, PAGE, register=registrar, background=True)
    if gate is not None:
        wait_until(lambda: len(registrar.live) == 9)
        gate.set()
    assert not arena.wait_ready(120)
    assert arena.ready_slots == 8
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    message = record.getMessage()
    assert f"registering bytes {2 * PIECE} to {3 * PIECE} failed" in message
    assert f"only the first {8 * PAGE} are used" in message
    assert "ulimit -l" in message
    assert "raise the limit" in message
    assert registrar.live == {arena.address: PIECE, arena.address + PIECE: PIECE}
    assert resident_bytes(arena.address, arena.nbytes) == 8 * PAGE
    assert not registrar.unmapped_too_early
    arena.view()[:8] = 3
    del arena
    gc.collect()
    registrar.assert_undone()


@pytest.mark.usefixtures("two_threads")
def test_dropping_the_arena_stops_the_threads_and_then_frees(small_pieces, monkeypatch):
    populated: set[int] = set()
    after_pages(lambda offset, nbytes: populated.add(offset + nbytes), monkeypatch)
    registrar = GatedRegistrar()
    arena = HostArena(400, PAGE, register=registrar, background=True)
    address = arena.address
    assert registrar.reached.acquire(timeout=120)
    # One thread registers, and the other has all pages of its piece and waits for its turn.
    wait_until(lambda: {2 * PIECE, 3 * PIECE} <= populated)
    del arena
    gc.collect()
    # Had dropping it waited for the registration at the gate, nothing would be left now.
    assert is_mapped(address), "threads register it still"
    assert len(registrar.live) == 1
    registrar.opened.set()
    wait_until(lambda: not pinning_threads())
    assert len(registrar.calls) == 2, "no registration is begun after the arena was dropped"
    registrar.assert_undone()


SCRIPT = """
import atexit, os, sys, threading, time
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena
from kv_swap.memory.registration import MemoryRoom

class Slow:
    def register(self, address, nbytes):
        time.sleep(0.05)
    def unregister(self, address):
        print("unregistered", flush=True)

# Registered before the pool's own, so it runs after that.
atexit.register(lambda: print(
    "left", sum(thread.name == "kv-swap-pin" for thread in threading.enumerate()), flush=True
))
registration.PIECE_BYTES = registration.BATCH_BYTES = 1 << 20
registration.RETRY_SECONDS = 600
# A machine may be slow. A wait that takes all its time leaves threads.
registration._EXIT_SECONDS = 200.0
room = MemoryRoom(lambda: (0, "a played host"), 1) if how == "short of memory" else None
arena = HostArena(1000, 1 << 20, register=Slow(), background=True, room=room)
if room:
    while not arena._registration._short:
        time.sleep(0.001)
if how == "forked" and (child := os.fork()):
    print("child", os.waitpid(child, 0)[1], flush=True)
elif how == "forked":
    sys.exit()
print("slots", arena.ready_slots < 1000, flush=True)
"""


@pytest.mark.parametrize("how", ["registering", "short of memory", "forked"])
def test_the_process_may_end_while_threads_register(how):
    """A forked child waits for no thread of its parent, nor for a lock held at the fork."""
    lines = run_code(f"how = {how!r}{SCRIPT}").splitlines()
    assert lines[-2:] == ["slots True", "left 0"]
    assert "unregistered" not in lines
    assert ("child 0" in lines) == (how == "forked")


# -- little memory -----------------------------------------------------------------------------

HEADROOM = 8 * PAGE


class Host:
    """A host with little memory: what the arena at `address` has of it is not available."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.taken = 0
        self.readings: list[threading.Thread] = []

    def read(self) -> tuple[int, str]:
        self.readings.append(threading.current_thread())
        return self.free_bytes - self.taken, "a played host"

    def arena(self, registrar: Registrar | None = None, **more: Any) -> HostArena:
        registrar, room = registrar or Registrar(), MemoryRoom(self.read, HEADROOM)
        return HostArena(40, PAGE, register=registrar, background=True, room=room, **more)


@pytest.fixture
def host(small_pieces: int, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Count what is populated, and look again at once."""
    host, lock = Host(free_bytes=1 << 40), threading.Lock()

    def take(_offset: int, nbytes: int) -> None:
        with lock:
            host.taken += nbytes

    after_pages(take, monkeypatch)
    monkeypatch.setattr(registration, "RETRY_SECONDS", 0.01)
    return host


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def assert_stops_at(ready_slots: int, host: Host, arena: HostArena) -> None:
    """Threads get so far, and then look again and again with nothing under way."""
    wait_until(lambda: arena.ready_slots >= ready_slots)
    wait_until_all_look_again(host)
    assert arena.ready_slots == ready_slots
    assert host.taken == ready_slots * PAGE


def wait_until_all_look_again(host: Host) -> None:
    """Wait until each thread has looked, found too little, and looked again."""
    before = Counter(host.readings)
    wait_until(lambda: all(host.readings.count(t) >= before[t] + 2 for t in pinning_threads()))


def test_the_pool_stops_growing_before_it_takes_the_headroom_and_grows_on_later(host, caplog):
    host.free_bytes = 5 * PIECE + HEADROOM + PIECE - PAGE
    arena = host.arena()
    assert_stops_at(20, host, arena)
    assert not arena.wait_ready(0.01)
    host.free_bytes += PIECE
    assert_stops_at(24, host, arena)
    host.free_bytes = 1 << 40
    assert arena.wait_ready(120)
    assert warnings_of(caplog) == [  # one is enough
        f"host memory is short: the pool keeps {5 * PIECE} of {40 * PAGE} bytes, and grows when "
        f"memory is free: {HEADROOM + PIECE - PAGE} bytes are available (a played host), {PIECE} "
        f"are wanted next, and {HEADROOM} must stay free; free memory, or use a smaller pool"
    ]


def test_with_enough_memory_nothing_is_said_and_each_piece_looks_once(host, caplog):
    arena = host.arena()
    assert arena.wait_ready(120)
    assert not warnings_of(caplog)
    assert len(host.readings) == 9, "the first piece is the start's, which reads nothing"


def test_little_memory_is_looked_at_before_every_step_of_a_piece(host, monkeypatch):
    """Another process takes memory after the piece was begun: its second half waits."""
    host.free_bytes = 2 * PIECE + HEADROOM

    def lose_a_piece(offset: int, _nbytes: int) -> None:
        host.free_bytes -= PIECE * (offset == PIECE)

    after_pages(lose_a_piece, monkeypatch)
    arena = host.arena()
    wait_until_all_look_again(host)
    assert arena.ready_slots == 4
    assert host.taken == PIECE + 2 * PAGE
    host.free_bytes = 1 << 40
    assert arena.wait_ready(120)


def test_memory_that_another_process_has_taken_for_both_needs_no_room(host, caplog):
    """Ranks that share memory lock it at their own pace; all of it is of use to the slowest."""
    host.free_bytes = 0
    with SharedMemory.create(40 * PAGE) as memory:
        other = Mapping(memory.nbytes, fd=memory.fileno())
        other.populate(0, 5 * PIECE + 2 * PAGE)
        arena = host.arena(shared=memory)
    wait_until(lambda: arena.ready_slots == 20)
    wait_until(lambda: f"{2 * PAGE} are wanted next" in caplog.text)
    wait_until_all_look_again(host)
    assert arena.ready_slots == 20
    other.populate(5 * PIECE, 5 * PIECE)
    assert arena.wait_ready(120)


def test_a_pool_that_waits_for_memory_ends_at_once(host, monkeypatch, caplog):
    monkeypatch.setattr(registration, "RETRY_SECONDS", 600)
    host.free_bytes = 2 * PIECE + HEADROOM
    registrar = Registrar()
    arena = host.arena(registrar)
    wait_until(lambda: "grows when memory is free" in caplog.text)
    assert len(registrar.live) == 2
    del arena
    gc.collect()
    wait_until(lambda: not pinning_threads())
    registrar.assert_undone()


def test_threads_that_wait_for_memory_end_when_a_piece_fails(host, monkeypatch, caplog):
    monkeypatch.setattr(registration, "RETRY_SECONDS", 600)
    host.free_bytes = 2 * PIECE + HEADROOM
    registrar = GatedRegistrar(failing_offset=PIECE)
    arena = host.arena(registrar)
    assert registrar.reached.acquire(timeout=120)
    registrar.opened.set()
    assert not arena.wait_ready(120)
    assert arena.ready_slots == 4
    assert f"registering bytes {PIECE} to {2 * PIECE} failed" in caplog.text


def test_where_memory_cannot_be_read_the_pool_keeps_what_it_has(host, monkeypatch, caplog):
    def fail() -> tuple[int, str]:
        raise OSError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(host, "read", fail)
    arena = host.arena()
    assert not arena.wait_ready(120)
    assert arena.ready_slots == 4
    assert "Permission denied" in caplog.text
