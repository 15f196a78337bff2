"""Which arenas of peers the ranks are asked to map, and from when to when loads may read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_offload.cache.directory import DIRECTORY, Directory, open_directory, read_names
from kv_offload.messages import OffloadWorkerMetadata, RankReport, Window
from kv_offload.scheduler import windows
from kv_offload.scheduler.request import Hit
from tests.kv_offload.test_host_pool import PooledEngine

SLOTS = 30
KEYS = [b"key %d" % number for number in range(4)]


class Bed:
    """An engine, and the seat of a peer with arenas like its own, which no process has."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 2) -> None:
        self.engine = PooledEngine(folder, slots=SLOTS, ranks=ranks)
        for rank in self.engine.ranks:  # the test reports in their place
            rank.connector.offload_worker._peers.windows = None
        self.now = 100.0
        monkeypatch.setattr(windows.time, "monotonic", lambda: self.now)
        self.seat = self.engine.seat.with_name("seat-1")
        own = open_directory(self.engine.seat)
        assert own is not None
        names = read_names(own.files)
        self.files = {rank: name.rpartition(".")[0] + ".peer" for rank, name in names.items()}
        self.paths = {rank: str(self.seat / name) for rank, name in self.files.items()}
        self.manager: Any = self.engine.offload.manager
        self.plan()

    def make_peer(self, usable: int = SLOTS) -> Directory:
        self.seat.mkdir(exist_ok=True)
        for name in self.files.values():
            (self.seat / name).touch()
        directory = Directory(self.seat, self.files, SLOTS)
        directory.allow(usable)
        directory.publish(np.arange(4, dtype=np.int32), KEYS)
        self.manager.peers.directories.refresh()
        return directory

    def plan(self) -> tuple[Window, ...]:
        """Plan a step in which nothing is computed; return its changes of windows."""
        found: list[Window] = []
        self.engine.schedule()
        output = self.engine.scheduled[-1]
        found += getattr(output, "kv_connector_metadata", output).windows
        self.engine.finish_steps()
        return tuple(found)

    def report(self, windows: dict[int, tuple[str, int]], rank: int) -> None:
        report = OffloadWorkerMetadata({rank: RankReport(windows=windows)})
        self.engine.offload.apply_report(report)

    def map_all(self, slots: int = SLOTS) -> None:
        for rank, path in self.paths.items():
            self.report({1: (path, slots)}, rank)

    def unmap_all(self) -> None:
        for rank in self.paths:
            self.report({}, rank)

    @property
    def readable(self) -> int:
        return int(self.manager.readable(KEYS).sum())


def test_a_peer_is_mapped_and_read_once_all_ranks_have_it(memory_folder, monkeypatch) -> None:
    bed = Bed(memory_folder, monkeypatch)
    bed.make_peer()
    assert bed.engine.offload.has_pending_work
    assert bed.plan() == (Window(1, bed.paths, SLOTS),)
    assert bed.plan() == ()
    assert bed.engine.offload.has_pending_work
    bed.report({1: (bed.paths[0], SLOTS)}, 0)
    assert not bed.readable
    bed.report({1: (bed.paths[1], 2)}, 1)
    assert bed.readable == 2
    bed.report({1: (bed.paths[1], SLOTS)}, 1)
    assert bed.readable == 4
    assert bed.engine.offload.gauges()["peers"] == 1
    bed.plan()
    assert not bed.engine.offload.has_pending_work


def test_a_report_of_another_file_does_not_count(memory_folder, monkeypatch) -> None:
    bed = Bed(memory_folder, monkeypatch)
    bed.make_peer()
    bed.plan()
    bed.map_all()
    assert bed.readable == 4
    bed.report({1: ("another", SLOTS), 2: (bed.paths[0], SLOTS)}, 0)
    assert not bed.readable
    bed.map_all()
    assert bed.readable == 4


def test_a_window_that_no_rank_reports_is_sent_again(memory_folder, monkeypatch) -> None:
    bed = Bed(memory_folder, monkeypatch)
    bed.make_peer()
    sent = bed.plan()
    bed.now += windows.PATIENCE_SECONDS
    assert not bed.engine.offload._windows.has_work
    assert bed.plan() == sent
    assert not bed.engine.offload._windows.has_work  # an idle engine rests meanwhile
    bed.map_all()
    bed.now += windows.PATIENCE_SECONDS
    assert bed.plan() == ()


def test_a_peer_that_still_gets_memory_is_mapped_later(memory_folder, monkeypatch) -> None:
    """Or once it gets none any more: its engine may have been killed meanwhile."""
    bed = Bed(memory_folder, monkeypatch)
    directory = bed.make_peer(usable=0)
    assert bed.plan() == ()
    directory.allow(10)
    assert bed.plan() == ()
    bed.now += windows.GROWING_SECONDS - 1
    directory.allow(20)
    assert bed.plan() == ()
    bed.now += windows.GROWING_SECONDS - 1
    assert bed.plan() == ()
    bed.now += 1
    assert bed.plan() == (Window(1, bed.paths, 20),)


@pytest.mark.parametrize("ends", ["is removed", "is replaced", "is retired", "own reset"])
def test_a_window_is_closed_at_once_and_unmapped_without_leases(
    memory_folder, monkeypatch, ends: str
) -> None:
    bed = Bed(memory_folder, monkeypatch)
    directory = bed.make_peer()
    bed.plan()
    bed.map_all()
    assert bed.readable == 4
    assert bed.manager.reserve(KEYS[:2])
    load = bed.manager.prepare_load(KEYS[:2])
    match ends:
        case "is removed":
            (bed.seat / DIRECTORY).unlink()
        case "is replaced":
            (bed.seat / bed.files[0]).rename(bed.seat / "rank-0.other")
        case "is retired":
            directory.retire()
        case "own reset":
            bed.manager.reset()
    bed.manager.peers.directories.refresh()
    assert bed.plan() == ()
    assert not bed.readable
    bed.map_all()
    assert not bed.readable  # late reports open nothing
    assert bed.plan() == ()
    assert not bed.engine.offload._windows.has_work
    bed.manager.complete_load(load)
    assert bed.engine.offload.has_pending_work  # an idle engine holds no memory of others
    monkeypatch.setattr(bed.engine.offload._windows, "_is_to_rest", lambda: True)
    assert not bed.engine.offload.has_pending_work
    assert bed.plan() == (Window(1, {}),)
    bed.report({}, 0)
    assert 1 in bed.engine.offload._windows._mapped
    bed.report({}, 1)
    bed.plan()
    assert not bed.engine.offload._windows._mapped
    assert bed.plan() == ()


def is_mapped(file: Path) -> bool:
    """Return whether this process has a file mapped that was removed."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.endswith(f" {file} (deleted)") for line in lines)


@pytest.mark.parametrize("state", ["growing", "mapped", "used"])
def test_a_removed_directory_is_unmapped_once_nothing_reads_it(
    memory_folder, monkeypatch, state: str
) -> None:
    """Else an engine would keep the memory of each directory that it has seen."""
    bed = Bed(memory_folder, monkeypatch)
    directory = bed.make_peer(usable=SLOTS if state != "growing" else SLOTS - 1)
    bed.plan()
    if state != "growing":
        bed.map_all()
    if state == "used":
        assert bed.readable == 4
        assert bed.manager.reserve(KEYS)
        load = bed.manager.prepare_load(KEYS)
    directory.close()
    del directory
    (bed.seat / DIRECTORY).unlink()
    bed.manager.peers.directories.refresh()
    if state == "used":
        bed.plan()
        assert is_mapped(bed.seat / DIRECTORY)
        bed.manager.complete_load(load)
    for rank in range(2):
        bed.plan()
        bed.report({}, rank)
    for _ in range(10):
        if bed.engine.offload.has_pending_work:  # else an idle engine does not step
            bed.plan()
    assert not bed.engine.offload.has_pending_work
    bed.manager.peers.directories.refresh()
    assert not is_mapped(bed.seat / DIRECTORY)


def test_a_retired_seat_is_mapped_again_for_the_next_engine(memory_folder, monkeypatch) -> None:
    bed = Bed(memory_folder, monkeypatch)
    directory = bed.make_peer()
    bed.plan()
    bed.map_all()
    directory.retire()
    assert bed.plan() == (Window(1, {}),)
    bed.unmap_all()
    directory.close()
    bed.make_peer()
    assert bed.plan() == (Window(1, bed.paths, SLOTS),)
    assert not bed.readable
    bed.map_all()
    assert bed.readable == 4


def test_a_peer_that_is_out_of_sight_for_a_moment_is_mapped_again(
    memory_folder, monkeypatch
) -> None:
    """As when its folder could not be listed, while a load keeps its window."""
    bed = Bed(memory_folder, monkeypatch)
    bed.make_peer()
    bed.plan()
    bed.map_all()
    assert bed.readable == 4
    assert bed.manager.reserve(KEYS)
    load = bed.manager.prepare_load(KEYS)
    (bed.seat / DIRECTORY).rename(bed.seat / "away")
    bed.manager.peers.directories.refresh()
    bed.plan()
    (bed.seat / "away").rename(bed.seat / DIRECTORY)
    bed.manager.peers.directories.refresh()
    bed.manager.complete_load(load)
    assert bed.engine.offload.has_pending_work
    assert bed.plan() == (Window(1, {}),)
    bed.unmap_all()
    changes = [*bed.plan(), *bed.plan()]
    assert changes == [Window(1, bed.paths, SLOTS)]
    bed.map_all()
    assert bed.readable == 4


def test_bytes_from_peers_are_counted(memory_folder, monkeypatch) -> None:
    bed = Bed(memory_folder, monkeypatch)
    bed.make_peer()
    bed.plan()
    bed.map_all()
    assert bed.readable == 4
    assert bed.manager.reserve(KEYS)
    assert bed.engine.offload.gauges()["leased_slots"] == 4
    assert bed.engine.offload.gauges()["peer_slots"] == SLOTS
    bed.plan()
    assert bed.engine.offload.gauges()["leased_slots"] == 0


def test_a_hit_whose_blocks_are_still_being_written_here_is_leased_with_each_offer(
    memory_folder, monkeypatch
) -> None:
    bed = Bed(memory_folder, monkeypatch)
    bed.make_peer()
    bed.plan()
    bed.map_all()
    manager, lookups = bed.manager, bed.engine.offload._lookups
    manager.prepare_store(KEYS[:1])
    assert manager.readable(KEYS[:1]).all()
    assert not manager.holds(manager.find(KEYS[:1])).any()
    hit = Hit(0, 4, 4, KEYS[:1], manager.forgotten - 1, lookups._arrivals, bed.now)
    assert lookups._still_holds(hit, 0, 4)
    manager.prepare_load(KEYS[:1])
    bed.plan()
    assert not lookups._still_holds(hit, 0, 4)
