from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kv_swap.errors import PinnedMemoryError
from kv_swap.memory import pieces, registration
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import Mapping
from kv_swap.memory.registration import choose_piece_bytes
from kv_swap.memory.room import MemoryRoom
from kv_swap.memory.shared import SharedMemory

from tests.support.registrars import PAGE, GatedRegistrar, Registrar, is_mapped, resident_bytes

PIECE = 4 * PAGE


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(registration, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(registration, "POPULATE_BYTES", 2 * PAGE)
    return PIECE


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two threads at least, also on a machine of one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def pinning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-swap-pin"]


def hold_pages_of(piece: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep the thread that gives a piece its pages waiting until the event is set."""
    gate = threading.Event()
    original = Mapping.populate

    def populate(mapping: Mapping, offset: int, nbytes: int) -> None:
        assert offset // PIECE != piece or gate.wait(120)
        original(mapping, offset, nbytes)

    monkeypatch.setattr(Mapping, "populate", populate)
    return gate


# -- memory and its lifetime -------------------------------------------------------------------


def test_arena_is_exact_and_zero() -> None:
    arena = HostArena(7, 48, register=None)
    view = arena.view()
    assert view.shape == (7, 48)
    assert view.dtype == np.uint8
    assert arena.nbytes == 7 * 48
    assert view.ctypes.data == arena.address
    assert view.flags.writeable
    assert not view.any()
    view[3] = 9
    assert (arena.view()[3] == 9).all()


def test_an_arena_that_is_not_registered_is_ready_at_once() -> None:
    before = threading.active_count()
    arena = HostArena(1 << 20, PAGE, register=None, background=True)
    assert arena.ready_slots == arena.num_slots
    assert arena.wait_ready(0)
    assert threading.active_count() == before
    assert resident_bytes(arena.address) == 0


@pytest.mark.parametrize("drop_arena_first", [True, False])
def test_memory_lives_as_long_as_any_view(drop_arena_first: bool) -> None:
    registrar = Registrar()
    arena = HostArena(4, PAGE, register=registrar)
    owner = weakref.ref(arena._owner)
    derived = arena.view()[1:3].view(np.int32).reshape(-1)[::2]
    if drop_arena_first:
        del arena
        gc.collect()
        assert owner() is not None
        assert registrar.live
        derived[:] = 7
        del derived
    else:
        del derived
        gc.collect()
        assert owner() is not None
        del arena
    gc.collect()
    assert owner() is None
    registrar.assert_undone()


@pytest.mark.parametrize("num_slots", [1 << 40, 1 << 60])
def test_memory_that_cannot_be_mapped(num_slots: int) -> None:
    with pytest.raises(PinnedMemoryError, match="cannot map ") as caught:
        HostArena(num_slots, 1 << 20, register=None)
    assert str(num_slots << 20) in str(caught.value)
    assert "ulimit -l" in str(caught.value)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 16), (16, 0), (-1, 16)])
def test_refuses_empty_arenas(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(PinnedMemoryError, match="at least 1 slot"):
        HostArena(num_slots, slot_bytes, register=None)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_leaves_the_memory_alone(small_pieces: int) -> None:
    registrar = Registrar()
    arena = HostArena(9, PAGE, register=registrar)
    arena.view()[:] = 5
    child = os.fork()
    if child == 0:
        # A failure must not run the rest of the tests in the child.
        try:
            absent = not is_mapped(arena.address)
            live = len(registrar.live)
            del arena
            gc.collect()
            os._exit(0 if absent and live == len(registrar.live) == 3 else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (arena.view() == 5).all()


# -- registration ------------------------------------------------------------------------------


def test_registers_every_byte_in_bounded_pieces(small_pieces: int) -> None:
    registrar = Registrar()
    arena = HostArena(9, PAGE, register=registrar)
    assert sorted(registrar.calls) == [
        (arena.address, PIECE),
        (arena.address + PIECE, PIECE),
        (arena.address + 2 * PIECE, PAGE),
    ]
    assert arena.ready_slots == 9
    assert arena.wait_ready(0)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(1000, 65536), (257, 81936), (3001, 21328)])
def test_pinned_bytes_are_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, num_slots: int, slot_bytes: int
) -> None:
    monkeypatch.setattr(registration, "PIECE_BYTES", 16 << 20)
    registrar = Registrar()
    arena = HostArena(num_slots, slot_bytes, register=registrar)
    pinned_bytes = sum(nbytes for _, nbytes in registrar.calls)
    assert arena.nbytes <= pinned_bytes <= 1.01 * arena.nbytes
    assert resident_bytes(arena.address) == pinned_bytes


def test_every_page_exists_before_its_piece_is_registered(small_pieces: int) -> None:
    class Looking(Registrar):
        least = 1 << 62

        def register(self, address: int, nbytes: int) -> None:
            super().register(address, nbytes)
            assert self.base is not None
            self.least = min(self.least, resident_bytes(address) - (address + nbytes - self.base))

    registrar = Looking()
    arena = HostArena(64, PAGE, register=registrar)
    # Threads take pieces in order, so of those before a piece only the other threads' are missing.
    assert registrar.least >= -(registration.NUM_THREADS - 1) * PIECE
    assert arena.ready_slots == 64


@pytest.mark.parametrize(
    ("slot_bytes", "piece_bytes"),
    [
        (PAGE, 256 << 20),
        (2 << 20, 256 << 20),
        (3 * PAGE, (256 << 20) // (3 * PAGE) * 3 * PAGE),
        (PAGE + 16, (256 << 20) // (257 * PAGE) * 257 * PAGE),
        (300 << 20, 256 << 20),
    ],
)
def test_no_slot_lies_in_two_pieces_where_it_fits(slot_bytes: int, piece_bytes: int) -> None:
    assert choose_piece_bytes(slot_bytes) == piece_bytes
    assert piece_bytes % PAGE == 0
    if math.lcm(slot_bytes, PAGE) <= 256 << 20:
        assert piece_bytes % slot_bytes == 0


def test_partial_registration_is_undone(small_pieces: int) -> None:
    registrar = Registrar(failing_offset=2 * PIECE)
    with pytest.raises(PinnedMemoryError) as caught:
        HostArena(12, PAGE, register=registrar)
    message = str(caught.value)
    assert f"page-lock {12 * PAGE} bytes" in message
    assert f"bytes {2 * PIECE} to {3 * PIECE}" in message
    assert "cudaErrorMemoryAllocation" in message
    assert "ulimit -l" in message
    assert "smaller pool" in message
    assert len(registrar.calls) == 2
    registrar.assert_undone()
    wait_until(lambda: not pinning_threads())


@pytest.mark.parametrize("logged", [True, False])
def test_memory_that_cannot_be_unregistered_stays_mapped(
    logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where no record of the log holds it through a traceback."""
    registrar = Registrar()

    def refuse(address: int) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(registrar, "unregister", refuse)
    monkeypatch.setattr(pieces, "_LEAKED", [])
    caplog.set_level(logging.ERROR if logged else logging.CRITICAL, "kv_swap")
    arena = HostArena(1, PAGE, register=registrar)
    address = arena.address
    del arena
    gc.collect()
    assert is_mapped(address)
    assert ("cannot unregister" in caplog.text) == logged


# -- in the background -------------------------------------------------------------------------


@pytest.mark.usefixtures("two_threads")
def test_slots_become_ready_in_order_of_their_number(
    small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_pages_of(1, monkeypatch)
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


class TimedRegistrar(Registrar):
    """Takes 5 ms, and records when each registration began and ended, and on which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[float, float, threading.Thread]] = []

    def register(self, address: int, nbytes: int) -> None:
        began = time.monotonic()
        time.sleep(0.005)
        super().register(address, nbytes)
        self.times.append((began, time.monotonic(), threading.current_thread()))


@pytest.mark.parametrize("background", [True, False])
def test_the_driver_is_left_alone_after_each_registration_in_the_background(
    background: bool, small_pieces: int
) -> None:
    registrar = TimedRegistrar()
    arena = HostArena(40, PAGE, register=registrar, background=background)
    assert arena.wait_ready(120)
    times = sorted(registrar.times[1:])
    assert len(times) == 9
    assert (threading.main_thread() in {thread for *_, thread in times}) == (not background)
    rest = registration.REST if background else 0
    for (began, ended, _), (next_began, *_) in itertools.pairwise(times):
        assert next_began - ended >= rest * (ended - began)


def test_a_slot_is_ready_only_with_its_last_byte(
    small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "NUM_THREADS", 1)  # pieces come to the gate in order
    registrar = GatedRegistrar()
    arena = HostArena(3, PIECE + PAGE, register=registrar, background=True)
    assert arena.piece_bytes == PIECE
    assert arena.ready_slots == 0
    registrar.let_in(PIECE)
    wait_until(lambda: arena.ready_slots == 1)
    registrar.let_in()
    assert arena.wait_ready(120)
    assert sum(registrar.live.values()) == arena.nbytes


def test_the_end_is_logged_with_where_the_memory_is(
    small_pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kv_swap")
    arena = HostArena(16, PAGE, register=Registrar(), background=True)
    assert arena.wait_ready(120)
    assert f"page-locked {16 * PAGE} bytes from any NUMA node" in caplog.text


def test_progress_is_logged_every_so_often(
    small_pieces: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kv_swap")

    def lines() -> list[str]:
        arena = HostArena(16, PAGE, register=Registrar(), background=True)
        assert arena.wait_ready(120)
        return [r.getMessage() for r in caplog.records if "the pool grows" in r.getMessage()]

    monkeypatch.setattr(registration, "PROGRESS_SECONDS", 600.0)
    assert lines() == [], "the control: it takes less time than passes between two lines"
    monkeypatch.setattr(registration, "PROGRESS_SECONDS", 0.0)
    first, *_ = lines()
    line = r"page-locked 0\.0 of 0\.0 GiB after \d+ s; the pool grows meanwhile"
    assert re.fullmatch(line, first)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("last", [False, True])
def test_a_failure_in_the_background_caps_the_arena(
    last: bool,
    small_pieces: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the piece that fails is the last one: those behind it are given back."""
    registrar = Registrar(failing_offset=2 * PIECE)
    gate = hold_pages_of(2, monkeypatch) if last else None
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
    assert resident_bytes(arena.address) == 8 * PAGE
    assert not registrar.unmapped_too_early
    arena.view()[:8] = 3
    del arena
    gc.collect()
    registrar.assert_undone()


def test_the_first_piece_fails_at_once_also_in_the_background(small_pieces: int) -> None:
    registrar = Registrar(failing_offset=0)
    with pytest.raises(PinnedMemoryError, match=f"bytes 0 to {PIECE} failed") as caught:
        HostArena(40, PAGE, register=registrar, background=True)
    assert "are used" not in str(caught.value)
    registrar.assert_undone()
    wait_until(lambda: not pinning_threads())


def test_memory_that_runs_out_is_a_failure_of_its_piece(
    small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def populate(mapping: object, offset: int, nbytes: int) -> None:
        if offset >= PIECE:
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("kv_swap.memory.mapping.Mapping.populate", populate)
    registrar = Registrar()
    arena = HostArena(40, PAGE, register=registrar, background=True)
    assert not arena.wait_ready(120)
    assert arena.ready_slots == 4
    with pytest.raises(PinnedMemoryError, match="Cannot allocate memory"):
        HostArena(40, PAGE, register=registrar)


@pytest.mark.usefixtures("two_threads")
def test_dropping_the_arena_stops_the_threads_and_then_frees(
    small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    populated: set[int] = set()
    original = Mapping.populate

    def populate(mapping: Mapping, offset: int, nbytes: int) -> None:
        original(mapping, offset, nbytes)
        populated.add(offset + nbytes)

    monkeypatch.setattr(Mapping, "populate", populate)
    registrar = GatedRegistrar()
    arena = HostArena(400, PAGE, register=registrar, background=True)
    address = arena.address
    registrar.wait_for(1)
    # One thread registers, and the other has all pages of its piece and waits for its turn.
    wait_until(lambda: {2 * PIECE, 3 * PIECE} <= populated)
    del arena
    gc.collect()
    # Had dropping it waited for the registration at the gate, nothing would be left now.
    assert is_mapped(address), "threads register it still"
    assert len(registrar.live) == 1
    registrar.let_in()
    wait_until(lambda: not pinning_threads())
    assert len(registrar.calls) == 2, "no registration is begun after the arena was dropped"
    registrar.assert_undone()


def test_a_view_keeps_the_threads_at_work(small_pieces: int) -> None:
    registrar = GatedRegistrar()
    arena = HostArena(40, PAGE, register=registrar, background=True)
    view = arena.view()
    del arena
    gc.collect()
    registrar.let_in()
    wait_until(lambda: len(registrar.live) == 10)
    view[:] = 1
    del view
    gc.collect()
    wait_until(lambda: not registrar.live)


def test_threads_that_cannot_start_are_an_error(
    small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    registrar = Registrar()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        HostArena(40, PAGE, register=registrar, background=True)
    registrar.assert_undone()


AT_EXIT = """
import atexit, threading
registration._EXIT_SECONDS = 200.0
# Registered before the pool's own, so it runs after that.
atexit.register(lambda: print(
    "left", sum(thread.name == "kv-swap-pin" for thread in threading.enumerate()), flush=True
))
"""
"""Tells how many threads the end of the process has not waited for.

A machine may be slow, so the wait may take long. A wait that takes all its time leaves threads.
"""

SCRIPT = f"""
import signal, sys, time
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena

# A shell's background jobs are started with it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
{AT_EXIT}

class Slow:
    def register(self, address, nbytes):
        time.sleep(0.05)
        print("registered", flush=True)
    def unregister(self, address):
        print("unregistered", flush=True)

registration.PIECE_BYTES = 1 << 20
arena = HostArena(1000, 1 << 20, register=Slow(), background=True)
print("started", arena.ready_slots, flush=True)
"""


def run_script(script: str, signal_number: int | None = None) -> tuple[int, str, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(registration.__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if signal_number is not None:
            assert process.stdout is not None
            assert any("started" in line for line in iter(process.stdout.readline, ""))
            process.send_signal(signal_number)
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
    return process.returncode, out, err


def test_the_process_may_end_while_threads_register() -> None:
    code, out, err = run_script(SCRIPT)
    assert (code, err) == (0, "")
    assert "started 1\n" in out
    assert "unregistered" not in out
    assert out.count("registered") < 100
    assert out.endswith("left 0\n")


FORKS = """
import os
child = os.fork()
if child == 0:
    sys.exit()
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(child, signal.SIGKILL)
print("child", ended == child, flush=True)
"""


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent() -> None:
    """It would wait for all of `_EXIT_SECONDS`, or for a lock that a thread held at the fork."""
    code, out, _ = run_script(SCRIPT + FORKS)
    assert code == 0
    assert "child True\n" in out


def test_an_interrupt_ends_the_process_while_threads_register() -> None:
    # Short sleeps: a signal just before one begins is seen when it ends.
    code, _, err = run_script(SCRIPT + "while True: time.sleep(0.05)", signal.SIGINT)
    assert code in (-signal.SIGINT, 130)
    assert err.rstrip().endswith("KeyboardInterrupt")


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

    @property
    def room(self) -> MemoryRoom:
        return MemoryRoom(self.read, HEADROOM)


@pytest.fixture
def host(small_pieces: int, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Count what is populated, and look again at once."""
    host = Host(free_bytes=1 << 40)
    original, lock = Mapping.populate, threading.Lock()

    def populate(mapping: Mapping, offset: int, nbytes: int) -> None:
        original(mapping, offset, nbytes)
        with lock:
            host.taken += nbytes

    monkeypatch.setattr(Mapping, "populate", populate)
    monkeypatch.setattr(registration, "RETRY_SECONDS", 0.01)
    return host


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def assert_stops_at(ready_slots: int, host: Host, arena: HostArena) -> None:
    """Threads get so far, and then look again and again with nothing under way."""
    wait_until(lambda: arena.ready_slots == ready_slots)
    wait_until_all_look_again(host)
    assert arena.ready_slots == ready_slots
    assert host.taken == ready_slots * PAGE


def wait_until_all_look_again(host: Host) -> None:
    """Wait until each thread has looked, found too little, and looked again."""
    before = Counter(host.readings)
    wait_until(lambda: all(host.readings.count(t) >= before[t] + 2 for t in pinning_threads()))


def test_the_pool_stops_growing_before_it_takes_the_headroom(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.free_bytes = 5 * PIECE + HEADROOM + PIECE - PAGE
    registrar = Registrar()
    arena = HostArena(40, PAGE, register=registrar, background=True, room=host.room)
    assert_stops_at(20, host, arena)
    assert host.free_bytes - host.taken >= HEADROOM
    arena.view()[:20] = 1
    assert not arena.wait_ready(0.01)
    assert warnings_of(caplog) == [
        f"host memory is short: the pool keeps {5 * PIECE} of {40 * PAGE} bytes, and grows when "
        f"memory is free: {HEADROOM + PIECE - PAGE} bytes are available (a played host), {PIECE} "
        f"are wanted next, and {HEADROOM} must stay free; free memory, or use a smaller pool"
    ]


def test_it_grows_on_when_memory_is_free_again(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.free_bytes = 2 * PIECE + HEADROOM
    arena = HostArena(40, PAGE, register=Registrar(), background=True, room=host.room)
    assert_stops_at(8, host, arena)
    host.free_bytes += 3 * PIECE
    assert_stops_at(20, host, arena)
    host.free_bytes = 1 << 40
    assert arena.wait_ready(120)
    assert arena.ready_slots == 40
    assert len(warnings_of(caplog)) == 1, "one is enough"


def test_with_enough_memory_nothing_is_said_and_each_piece_looks_once(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    arena = HostArena(40, PAGE, register=Registrar(), background=True, room=host.room)
    assert arena.wait_ready(120)
    assert not warnings_of(caplog)
    assert arena.ready_slots == 40
    assert len(host.readings) == 9, "the first piece is the start's"
    assert threading.main_thread() not in host.readings, "an engine's start reads nothing"


def test_little_memory_is_looked_at_before_every_step_of_a_piece(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes memory after the piece was begun: its second half waits."""
    host.free_bytes = 2 * PIECE + HEADROOM
    original = Mapping.populate

    def populate(mapping: Mapping, offset: int, nbytes: int) -> None:
        original(mapping, offset, nbytes)
        if offset == PIECE:
            host.free_bytes -= PIECE

    monkeypatch.setattr(Mapping, "populate", populate)
    arena = HostArena(40, PAGE, register=Registrar(), background=True, room=host.room)
    wait_until_all_look_again(host)
    assert arena.ready_slots == 4
    assert host.taken == PIECE + 2 * PAGE
    host.free_bytes = 1 << 40
    assert arena.wait_ready(120)


def test_memory_that_another_process_has_taken_for_both_needs_no_room(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that share memory lock it at their own pace; all of it is of use to the slowest."""
    host.free_bytes = 0
    with SharedMemory.create(f"{os.getpid()}-room", 40 * PAGE, 0) as memory:
        other = Mapping(memory.nbytes, fd=memory.fileno())
        other.populate(0, 5 * PIECE + 2 * PAGE)
        arena = HostArena(
            40, PAGE, register=Registrar(), background=True, shared=memory, room=host.room
        )
    wait_until(lambda: arena.ready_slots == 20)
    wait_until(lambda: f"{2 * PAGE} are wanted next" in caplog.text)
    wait_until_all_look_again(host)
    assert arena.ready_slots == 20
    other.populate(5 * PIECE, 5 * PIECE)
    assert arena.wait_ready(120)


def test_a_pool_that_waits_for_memory_ends_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "RETRY_SECONDS", 600)
    host.free_bytes = 2 * PIECE + HEADROOM
    registrar = Registrar()
    arena = HostArena(40, PAGE, register=registrar, background=True, room=host.room)
    wait_until(lambda: "grows when memory is free" in caplog.text)
    assert len(registrar.live) == 2
    del arena
    gc.collect()
    wait_until(lambda: not pinning_threads())
    registrar.assert_undone()


def test_threads_that_wait_for_memory_end_when_a_piece_fails(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "RETRY_SECONDS", 600)
    host.free_bytes = 2 * PIECE + HEADROOM
    registrar = GatedRegistrar(failing_offset=PIECE)
    arena = HostArena(40, PAGE, register=registrar, background=True, room=host.room)
    registrar.wait_for(1)
    registrar.let_in()
    assert not arena.wait_ready(120)
    assert arena.ready_slots == 4
    assert f"registering bytes {PIECE} to {2 * PIECE} failed" in caplog.text


def test_where_memory_cannot_be_read_the_pool_keeps_what_it_has(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> tuple[int, str]:
        raise OSError(13, "Permission denied", "/proc/meminfo")

    arena = HostArena(
        40, PAGE, register=Registrar(), background=True, room=MemoryRoom(fail, HEADROOM)
    )
    assert not arena.wait_ready(120)
    assert arena.ready_slots == 4
    assert "Permission denied" in caplog.text


ENDING_SCRIPT = f"""
import logging, threading
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena
from kv_swap.memory.room import MemoryRoom

{AT_EXIT}
class Registrar:
    def register(self, address, nbytes): pass
    def unregister(self, address): pass

class Heard(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        heard.set()

heard = threading.Event()
logging.getLogger("kv_swap").addHandler(Heard())
registration.PIECE_BYTES, registration.RETRY_SECONDS = 1 << 20, 600
room = MemoryRoom(lambda: (0, "a played host"), 1)
arena = HostArena(1000, 1 << 20, register=Registrar(), background=True, room=room)
assert heard.wait(120)
print("slots", arena.ready_slots, flush=True)
"""


def test_the_process_may_end_while_a_pool_waits_for_memory() -> None:
    code, out, err = run_script(ENDING_SCRIPT)
    assert (code, out) == (0, "slots 1\nleft 0\n")
    assert "host memory is short" in err
