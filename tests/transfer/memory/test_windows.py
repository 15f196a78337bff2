"""Windows, on files in memory; the contract of engines has what copies read of them."""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from kv_swap.memory import mapping, registration
from kv_swap.memory import windows as windows_module
from kv_swap.memory.arena import HostArena
from kv_swap.memory.windows import Windows, window_slots

from tests.support.children import passes_in_a_child
from tests.support.processes import run_code
from tests.support.registrars import PAGE, GatedRegistrar, Registrar, is_mapped, resident_bytes
from tests.support.waiting import wait_until

PIECE = 4 * PAGE
SLOTS = 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "PIECE_BYTES", PIECE)


def make_file(path: Path, num_slots: int = SLOTS) -> Path:
    path.write_bytes(b"".join(bytes([slot]) * PAGE for slot in range(num_slots)))
    return path


class Own(Registrar):
    """Locks an arena; `reading` locks what is in its windows."""

    def __init__(self, reading: Registrar) -> None:
        super().__init__()
        self.reading = reading

    def for_reading(self) -> Registrar:
        return self.reading


def make_arena(reading: Registrar | None = None) -> tuple[HostArena, Windows]:
    register = None if reading is None else Own(reading)
    arena = HostArena(SLOTS, PAGE, register=register, num_windows=2)
    assert arena.windows is not None
    return arena, arena.windows


def mapped_files() -> list[str]:
    """Return protection and name of the files that are mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [f"{line[1]} {Path(line[5]).name}" for line in lines if "/dev/shm/" in line[-1]]


def window_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-swap-window"]


def number(windows: Windows, window: int, slot: int) -> int:
    return (window + 1) * windows.window_slots + slot


@pytest.mark.parametrize("slot_bytes", [16, PAGE, 3 * PAGE, PAGE + 16, 2 << 20, 300 << 20])
def test_windows_begin_where_slots_and_pieces_do(slot_bytes):
    nbytes = window_slots(1000, slot_bytes) * slot_bytes
    assert window_slots(1000, slot_bytes) >= 1000
    assert nbytes % slot_bytes == nbytes % registration.choose_piece_bytes(slot_bytes) == 0


def test_slots_become_ready_as_pieces_are_locked_on_another_thread(memory_folder):
    reading = GatedRegistrar()
    arena, windows = make_arena(reading)
    windows.attach(1, str(make_file(memory_folder / "peer")), SLOTS)
    assert reading.reached.acquire(timeout=120), "the second piece was not tried"
    assert windows.ready_slots == [0, 4]
    windows.attach(1, str(memory_folder / "peer"), SLOTS)  # which changes nothing
    assert windows.ready_slots == [0, 4]
    reading.opened.set()
    wait_until(lambda: windows.ready_slots == [0, SLOTS])
    first = arena.address + number(windows, 1, 0) * PAGE
    assert reading.calls == [
        (first, PIECE),
        (first + PIECE, PIECE),
        (first + 2 * PIECE, 2 * PAGE),
    ]
    assert reading.threads == set(window_threads())
    assert mapped_files() == ["r--s peer"]
    assert arena.read(np.array([number(windows, 1, 3)], np.int32))[0, 0] == 3


def test_where_only_writable_memory_can_be_locked_it_is_mapped_so(memory_folder):
    reading = Registrar()
    reading.writes = True
    _, windows = make_arena(reading)
    windows.attach(0, str(make_file(memory_folder / "peer")), SLOTS)
    wait_until(lambda: windows.ready_slots == [SLOTS, 0])
    assert mapped_files() == ["rw-s peer"]


@pytest.mark.parametrize("reading", [None, Registrar()])
def test_another_file_takes_a_window_once_the_one_before_is_unmapped(memory_folder, reading):
    arena, windows = make_arena(reading)
    for index in range(3):
        path = memory_folder / str(index)
        path.write_bytes(bytes([index]) * PAGE * SLOTS)
        windows.attach(0, str(path), SLOTS)
        wait_until(lambda: windows.ready_slots[0] == SLOTS)
        assert mapped_files() == [f"r--s {index}"]
        assert set(arena.read(np.array([number(windows, 0, 9)], np.int32))[0]) == {index}
    windows.detach(0)
    assert windows.ready_slots == [0, 0], "at once"
    wait_until(lambda: not mapped_files())
    assert is_mapped(arena.address + number(windows, 0, 0) * PAGE), "addresses stay reserved"
    if reading is not None:
        assert not reading.live
        assert not reading.unmapped_too_early
    windows.detach(0)  # which changes nothing
    windows.attach(0, str(memory_folder / "1"), SLOTS)
    wait_until(lambda: windows.ready_slots[0] == SLOTS)


def test_a_window_is_unmapped_before_the_rest_of_another_is_locked(memory_folder):
    """A removed file keeps its memory as long as it is mapped."""
    reading = GatedRegistrar()
    _, windows = make_arena(reading)
    windows.attach(0, str(make_file(memory_folder / "first")), 4)
    wait_until(lambda: windows.ready_slots[0] == 4)
    windows.attach(1, str(make_file(memory_folder / "second")), SLOTS)
    assert reading.reached.acquire(timeout=120)
    windows.detach(0)
    reading.opened.set()
    wait_until(lambda: windows.ready_slots[1] == SLOTS)
    assert mapped_files() == ["r--s second"]


def test_no_page_is_allocated_in_a_file(memory_folder, caplog):
    path = memory_folder / "peer"
    make_file(path, 6)
    os.truncate(path, SLOTS * PAGE)
    reading = Registrar()
    _, windows = make_arena(reading)
    windows.attach(0, str(path), SLOTS)
    wait_until(lambda: "copies can read 4 of 10 slots" in caplog.text)
    assert f"has allocated only the first {6 * PAGE} of {8 * PAGE} bytes" in caplog.text
    assert windows.ready_slots == [4, 0]
    assert path.stat().st_blocks * 512 == 6 * PAGE
    windows.detach(0)
    wait_until(lambda: not mapped_files())
    assert not reading.live


def test_pages_that_were_swapped_out_are_there(memory_folder, monkeypatch):
    """Of those `mincore` says, as it does here, that they are not in memory."""
    monkeypatch.setattr(mapping._libc, "mincore", lambda address, nbytes, found: 0)
    _, windows = make_arena(Registrar())
    windows.attach(0, str(make_file(memory_folder / "peer")), SLOTS)
    wait_until(lambda: windows.ready_slots[0] == SLOTS)


def test_pages_are_faulted_in_while_the_driver_is_left_alone(memory_folder, monkeypatch):
    """Its rest has no end here; only the piece that is locked next is faulted in."""
    monkeypatch.setattr(windows_module, "REST", 1e12)
    reading = Registrar()
    reading.writes = True  # then the kernel faults in no neighbours
    arena, windows = make_arena(reading)
    windows.attach(0, str(make_file(memory_folder / "peer")), SLOTS)
    second = arena.address + number(windows, 0, 4) * PAGE
    wait_until(lambda: resident_bytes(second, PIECE) == PIECE)
    assert windows.ready_slots[0] == 4
    assert resident_bytes(second + PIECE, 2 * PAGE) == 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file"),
        (
            lambda path: make_file(path, SLOTS - 1),
            f"it has {9 * PAGE} bytes, and {10 * PAGE} are wanted",
        ),
        (lambda path: path.symlink_to(make_file(path.with_name("other"))), "symbolic links"),
    ],
)
def test_a_file_that_cannot_be_mapped_leaves_the_window_empty(memory_folder, caplog, make, reason):
    """Other windows are served, and the window takes another file."""
    make(memory_folder / "bad")
    _, windows = make_arena(Registrar())
    windows.attach(0, str(memory_folder / "bad"), SLOTS)
    windows.attach(1, str(make_file(memory_folder / "good")), SLOTS)
    wait_until(lambda: windows.ready_slots == [0, SLOTS])
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith(f"copies can read 0 of 10 slots of {memory_folder / 'bad'}: ")
    assert reason in warning
    windows.detach(0)
    windows.attach(0, str(memory_folder / "good"), SLOTS)
    wait_until(lambda: windows.ready_slots == [SLOTS, SLOTS])


def test_pieces_before_one_that_cannot_be_locked_are_read(memory_folder, caplog):
    reading = Registrar(failing_offset=2 * PIECE)
    _, windows = make_arena(reading)
    windows.attach(0, str(make_file(memory_folder / "peer")), SLOTS)
    wait_until(lambda: "copies can read 8 of 10 slots" in caplog.text)
    assert "cudaErrorMemoryAllocation" in caplog.text
    assert windows.ready_slots == [8, 0]
    windows.detach(0)
    wait_until(lambda: not mapped_files())
    assert not reading.live


def test_memory_that_cannot_be_unlocked_stays_mapped_and_its_window_is_not_used_again(
    memory_folder, monkeypatch, caplog
):
    reading = Registrar()
    _, windows = make_arena(reading)
    windows.attach(0, str(make_file(memory_folder / "first")), SLOTS)
    wait_until(lambda: windows.ready_slots[0] == SLOTS)

    def refuse(address: int) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(reading, "unregister", refuse)
    windows.attach(0, str(make_file(memory_folder / "second")), SLOTS)
    windows.attach(1, str(memory_folder / "second"), SLOTS)
    wait_until(lambda: windows.ready_slots == [0, SLOTS])
    assert mapped_files() == ["r--s first", "r--s second"]
    assert "cannot unregister" in caplog.text


# -- the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", [None, Registrar()])
@pytest.mark.parametrize("attached", [False, True])
def test_the_arena_takes_windows_with_it(memory_folder, reading, attached):
    others = window_threads()  # of earlier tests
    arena, windows = make_arena(reading)
    if attached:
        windows.attach(0, str(make_file(memory_folder / "peer")), SLOTS)
        wait_until(lambda: windows.ready_slots[0] == SLOTS)
    threads = [thread for thread in window_threads() if thread not in others]
    assert len(threads) == attached
    addresses = [arena.address + number(windows, window, 0) * PAGE for window in range(-1, 2)]
    view = arena.view()
    del arena
    gc.collect()
    assert is_mapped(addresses[0])
    del view
    gc.collect()
    for thread in threads:
        thread.join(120)
    assert not any(is_mapped(address) for address in addresses)
    assert not mapped_files()
    if reading is not None:
        assert not reading.live
        assert not reading.unmapped_too_early


SCRIPT = """
import atexit, threading, time
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena

class Slow:
    writes = False
    def for_reading(self):
        return self
    def register(self, address, nbytes):
        time.sleep(0.05)
    def unregister(self, address):
        print("unregistered", flush=True)

# Registered before the one of the windows, so it runs after that.
atexit.register(lambda: print(
    "left", sum(thread.name == "kv-swap-window" for thread in threading.enumerate()), flush=True
))
registration.PIECE_BYTES = 1 << 12
arena = HostArena(200, 1 << 12, register=None, num_windows=1)
arena.windows._register = Slow()
arena.windows.attach(0, path, 200)
while not arena.windows.ready_slots[0]:
    time.sleep(0.001)
print("ready", arena.windows.ready_slots[0] < 200, flush=True)
"""


def test_the_process_may_end_while_a_window_is_locked(memory_folder):
    path = make_file(memory_folder / "peer", 200)
    assert run_code(f"path = {str(path)!r}{SCRIPT}") == "ready True\nleft 0\n"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_leaves_windows_alone(memory_folder):
    reading = Registrar()
    arena, windows = make_arena(reading)
    windows.attach(0, str(make_file(memory_folder / "peer")), SLOTS)
    wait_until(lambda: windows.ready_slots[0] == SLOTS)
    address = arena.address + number(windows, 0, 0) * PAGE

    def drop() -> None:
        nonlocal arena
        assert not is_mapped(address)
        del arena
        gc.collect()
        assert len(reading.live) == 3

    assert passes_in_a_child(drop)
    assert arena.read(np.array([number(windows, 0, 2)], np.int32))[0, 0] == 2


# -- few addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "count"),
    [
        (1 << 10, 1 << 20, 64),
        (1 << 20, 1 << 20, 31),  # TiB
        (1 << 26, 16, 30),  # numbers have 31 bits, and the last one is for no slot
        (1 << 20, 64 << 20, 0),
    ],
)
def test_windows_are_as_many_as_can_be_numbered_and_leave_addresses_to_others(
    num_slots, slot_bytes, count, caplog
):
    caplog.set_level(logging.INFO, "kv_swap")
    windows = Windows(64, num_slots, slot_bytes, None)
    assert len(windows) == count
    assert (f"addresses for {count} windows" in caplog.text) == (count < 64)
    windows.release()


def test_a_process_with_few_addresses_has_fewer_windows():
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE + (6 << 30), before[1]))
    try:
        some, none = Windows(64, 1 << 10, 1 << 20, None), Windows(64, 1 << 14, 1 << 20, None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (len(some), len(none)) == (4, 0)
    some.release()
    none.release()


def test_an_arena_without_room_for_windows_is_an_arena():
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE + (1 << 30), before[1]))
    try:
        arena = HostArena(1 << 10, 1 << 19, register=None, num_windows=64)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert arena.windows is not None
    assert len(arena.windows) == 0
    arena.view()[5] = 3
    address = arena.address
    del arena
    gc.collect()
    assert not is_mapped(address)
