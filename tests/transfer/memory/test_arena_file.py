"""Arenas in files: what the next process finds, and what it leaves alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.arena import HostArena
from kv_swap.memory.arena_file import ArenaFiles, find_arenas, make_private_folder

SLOTS, SLOT_BYTES = 4, 4096
NBYTES = SLOTS * SLOT_BYTES


def files(folder: Path, rank: int = 0, kind: str = "kind", *, reserve: bool = True) -> ArenaFiles:
    return ArenaFiles(folder, rank, kind, reserve=reserve)


def arena(of: ArenaFiles, nbytes: int = NBYTES) -> tuple[str, HostArena]:
    name, shared = of.create(nbytes, 0)
    with shared:
        return name, HostArena(nbytes // SLOT_BYTES, SLOT_BYTES, register=None, shared=shared)


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
    first, _ = arena(files(tmp_path))
    other, _ = arena(files(tmp_path, 1))
    kind, _ = arena(files(tmp_path, kind="other"))
    assert {*find_arenas(tmp_path)} == {kind, other}
    larger, _ = arena(files(tmp_path, kind="other"), 2 * NBYTES)
    assert {*find_arenas(tmp_path)} == {larger, other}
    assert len({first, other, kind, larger}) == 4


def test_ranks_that_share_an_arena_see_the_same_bytes(tmp_path: Path) -> None:
    name, shared = files(tmp_path).create(NBYTES, 1)
    left, _ = arena(files(tmp_path, 1))  # of a start at which it had its own
    with shared, files(tmp_path, 1).attach(name, NBYTES) as attached:
        first, second = (
            HostArena(SLOTS, SLOT_BYTES, register=None, shared=one) for one in (shared, attached)
        )
    first.view()[1] = 9
    assert second.view()[1].tolist() == [9] * SLOT_BYTES
    assert left not in find_arenas(tmp_path)
    del first
    assert files(tmp_path).create(NBYTES, 0)[0] != name  # the other rank still has it


def test_memory_is_taken_at_once_where_nothing_will_lock_it(tmp_path: Path) -> None:
    taken = [
        sum(find_arenas(tmp_path).values())
        for reserve in (False, True)
        if files(tmp_path, kind=str(reserve), reserve=reserve).create(NBYTES, 0)
    ]
    assert taken == [0, NBYTES]


def test_a_filesystem_without_room_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    with pytest.raises(PinnedMemoryError, match="mount it larger"):
        files(tmp_path, reserve=False).create((room.f_bavail + 1000) * room.f_frsize, 0)
    assert [*tmp_path.iterdir()] == []


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
    _, shared = files(tmp_path).create(NBYTES, 0)
    with shared:
        second = HostArena(SLOTS, SLOT_BYTES, register=Registrar(), background=True, shared=shared)
    assert second.wait_ready(60)
    assert second.view()[:, 0].tolist() == [0, 1, 2, 3]
