"""The names of seats, and locks that one process has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kv_offload.cache.seats import find_seats, lock_file


def test_seats_come_by_number_and_other_folders_are_none(tmp_path: Path) -> None:
    for name in ("seat-10", "seat-2", "seat-", "seat-1.old", "others"):
        (tmp_path / name).mkdir()
    assert [seat.name for seat in find_seats(tmp_path)] == ["seat-2", "seat-10"]


def test_a_lock_is_had_once(tmp_path: Path) -> None:
    first = lock_file(tmp_path / "lock")
    assert first is not None
    assert lock_file(tmp_path / "lock") is None
    os.close(first)
    assert lock_file(tmp_path / "lock", creates=False) is not None


def test_a_file_is_made_only_for_who_wants_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_file(tmp_path / "lock", creates=False)
    assert [*tmp_path.iterdir()] == []
