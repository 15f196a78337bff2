"""Arenas in files: what the next process finds, and what it leaves alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_swap.errors import PinnedMemoryError
from kv_swap.memory import reading
from kv_swap.memory.arena import HostArena
from kv_swap.memory.arena_file import ArenaFiles, find_arenas, make_private_folder
from kv_swap.memory.registration import MemoryRoom
from kv_swap.memory.windows import Windows

from tests.support.waiting import wait_until

SLOTS, SLOT_BYTES = 4, 4096
NBYTES = SLOTS * SLOT_BYTES


def files(
    folder: Path,
    rank: int = 0,
    kind: str = "kind",
    room: MemoryRoom | None = None,
    *,
    reserve: bool = True,
) -> ArenaFiles:
    return ArenaFiles(folder, rank, kind, room, reserve=reserve)


def arena(of: ArenaFiles, nbytes: int = NBYTES) -> tuple[str, HostArena]:
    with of.create(nbytes) as shared:
        slots = nbytes // SLOT_BYTES, SLOT_BYTES
        return shared.name, HostArena(*slots, register=None, shared=shared)


def test_the_next_arena_of_the_same_kind_has_the_same_bytes(tmp_path: Path) -> None:
    name, first = arena(files(tmp_path))
    first.view()[2] = 7
    del first
    again, second = arena(files(tmp_path))
    assert again == name
    assert second.view().tolist() == [[0] * SLOT_BYTES] * 2 + [[7] * SLOT_BYTES, [0] * SLOT_BYTES]
    assert find_arenas(tmp_path) == {name: NBYTES}
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_an_arena_that_is_mapped_is_not_shared_with_another_process(tmp_path: Path) -> None:
    """Its handle is closed, and no descriptor of ours is open: the mapping alone has the lock."""
    name, first = arena(files(tmp_path))
    first.view()[:] = 7
    again, second = arena(files(tmp_path))
    assert again != name
    first.view()[:] = 8
    assert not second.view().any()
    assert [*find_arenas(tmp_path)] == [again]


def test_an_arena_that_goes_while_a_folder_is_read_is_left_out(tmp_path: Path) -> None:
    """Of engines that start at once one removes what another is just looking at."""

    class Folder(type(tmp_path)):  # type: ignore[misc]
        def glob(self, pattern: str) -> Iterator[Path]:
            yield self / "rank-0.kind.gone"
            yield from super().glob(pattern)

    name, _ = arena(files(tmp_path))
    assert find_arenas(Folder(tmp_path)) == {name: NBYTES}


def test_other_kinds_and_sizes_of_a_rank_are_removed_and_other_ranks_left(tmp_path: Path) -> None:
    first, other = arena(files(tmp_path))[0], arena(files(tmp_path, 1))[0]
    kind = arena(files(tmp_path, kind="other"))[0]
    assert {*find_arenas(tmp_path)} == {kind, other}
    larger = arena(files(tmp_path, kind="other"), 2 * NBYTES)[0]
    assert {*find_arenas(tmp_path)} == {larger, other}
    smaller = arena(files(tmp_path, kind="other"))[0]
    assert {*find_arenas(tmp_path)} == {smaller, other}
    assert len({first, other, kind, larger, smaller}) == 5


def test_ranks_that_share_an_arena_see_the_same_bytes(tmp_path: Path) -> None:
    shared = files(tmp_path).create(NBYTES)
    left, _ = arena(files(tmp_path, 1))  # of a start at which it had its own
    with shared, files(tmp_path, 1).attach(shared.name, NBYTES) as attached:
        first, second = (
            HostArena(SLOTS, SLOT_BYTES, register=None, shared=one) for one in (shared, attached)
        )
    first.view()[1] = 9
    assert second.view()[1].tolist() == [9] * SLOT_BYTES
    assert left not in find_arenas(tmp_path)
    del first
    assert files(tmp_path).create(NBYTES).name != shared.name  # the other rank still has it


def test_memory_is_taken_at_once_where_nothing_will_lock_it(tmp_path: Path) -> None:
    taken = [
        sum(find_arenas(tmp_path).values())
        for reserve in (False, True)
        if files(tmp_path, kind=str(reserve), reserve=reserve).create(NBYTES)
    ]
    assert taken == [0, NBYTES]


def test_a_filesystem_without_room_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    with pytest.raises(PinnedMemoryError, match="mount it larger"):
        files(tmp_path, reserve=False).create((room.f_bavail + 1000) * room.f_frsize)
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def reader(memory_folder: Path) -> Iterator[Windows]:
    """Reads the arena of a predecessor, and lets go of it once that was removed."""
    name = arena(files(memory_folder, kind="before"))[0]
    own = HostArena(SLOTS, SLOT_BYTES, register=None, num_windows=1)
    assert own.windows is not None
    own.windows.attach(0, str(memory_folder / name), SLOTS)
    wait_until(lambda: own.windows.ready_slots == [SLOTS])
    yield own.windows
    own.windows.detach(0)


def removed_and_mapped(folder: Path) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(str(folder) in line and line.endswith("(deleted)") for line in lines)


def test_the_memory_of_a_removed_arena_is_waited_for(
    memory_folder: Path, reader: Windows, caplog: pytest.LogCaptureFixture
) -> None:
    """What another process has mapped is not free, and it learns only now that it is gone."""
    looks = []

    def read() -> tuple[int, str]:
        looks.append(removed_and_mapped(memory_folder))
        if len(looks) == 2:
            reader.detach(0)
        return (0 if looks[-1] else NBYTES), "a test"

    files(memory_folder, kind="after", room=MemoryRoom(read, 0)).create(NBYTES)
    assert looks[:2] == [True, True]
    assert not looks[-1]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith(f"0 bytes are available (a test), {NBYTES} are wanted next")
    assert f"processes [{os.getpid()}] read arenas of {memory_folder}" in warning
    assert "waiting up to 120 s" in warning


def test_who_does_not_let_go_is_waited_for_so_long(
    memory_folder: Path, reader: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(100))
    monkeypatch.setattr(reading.time, "monotonic", lambda: 50.0 * next(now))
    waited: list[float] = []
    monkeypatch.setattr(reading.time, "sleep", waited.append)
    lacking = files(memory_folder, kind="after", room=MemoryRoom(lambda: (5, "a test"), 0))
    with pytest.raises(PinnedMemoryError) as caught:
        lacking.create(NBYTES)
    for part in (
        "5 bytes are available",
        f"{NBYTES} are wanted",
        "use a smaller pool",
        "processes",
    ):
        assert part in str(caught.value)
    assert len(waited) == 3
    assert find_arenas(memory_folder) == {}


def test_nobody_is_waited_for_where_nobody_reads(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading.time, "sleep", lambda _: pytest.fail("it waits"))
    arena(files(memory_folder, kind="before"))
    lacking = files(memory_folder, kind="after", room=MemoryRoom(lambda: (0, "a test"), 0))
    with pytest.raises(PinnedMemoryError, match="0 bytes are available"):
        lacking.create(NBYTES)


def test_a_folder_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    make_private_folder(folder)
    make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o770)
    for path in (folder, tmp_path / "link", tmp_path / "none" / "pool"):
        with pytest.raises(PinnedMemoryError, match="cannot keep host memory in"):
            make_private_folder(path)


def test_no_bytes_are_lost_when_the_arena_is_populated(tmp_path: Path) -> None:
    """As it is page-locked in the background: only pages that are missing are made."""

    class Registrar:
        def register(self, address: int, nbytes: int) -> None:
            pass

        def unregister(self, address: int) -> None:
            pass

    _, first = arena(files(tmp_path))
    first.view()[:] = np.arange(SLOTS, dtype=np.uint8)[:, None]
    del first
    with files(tmp_path).create(NBYTES) as shared:
        second = HostArena(SLOTS, SLOT_BYTES, register=Registrar(), background=True, shared=shared)
    assert second.wait_ready(60)
    assert second.view()[:, 0].tolist() == [0, 1, 2, 3]
