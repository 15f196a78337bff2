"""Loads that read slots of peers, whose arenas a plan has a rank map."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv_swap.memory.windows import Windows

from kv_offload.messages import WINDOW_BITS, Outcome, Window, peer_slots
from kv_offload.worker.pool import Seat
from kv_offload.worker.windows import MAX_SLOT, PeerArenas, count_windows
from tests.support.rank import Rank, load, store, synchronous
from tests.support.waiting import wait_until

SLOTS = 8


class Ranks:
    """Two engines of a pool, of one rank each. The slots of the first have what its blocks had."""

    def __init__(self, folder: Path) -> None:
        self.owner, self.reader = (self._start(folder / f"seat-{number}") for number in range(2))
        self.arena = self.owner.half.capacity().arena
        assert self.owner.store(store(0, (1, 2), (5, 6))) == {0: Outcome.OK}
        self.reader.report()

    @staticmethod
    def _start(seat: Path) -> Rank:
        seat.mkdir(0o700)
        return Rank(slots=SLOTS, seat=Seat(seat, {}, 0)).start()

    def attach(self) -> None:
        self.reader.step(windows=[Window(0, {0: self.arena}, SLOTS)])
        reports = [self.reader.report().windows]

        def is_ready() -> bool:
            self.reader.step()
            reports.append(self.reader.report().windows)
            return {0: (self.arena, SLOTS)} in reports

        if reports[0] != {0: (self.arena, SLOTS)}:
            assert reports[0] == {0: (self.arena, 0)}
            wait_until(is_ready)

    def close(self) -> None:
        for rank in (self.owner, self.reader):
            rank.half.shutdown()


@pytest.fixture
def ranks(memory_folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(memory_folder)
    yield ranks
    ranks.close()


def peer(slot: int) -> int:
    return int(peer_slots(0, np.array([slot], np.int32))[0])


@pytest.mark.parametrize("make", [load, synchronous])
def test_a_load_reads_slots_of_a_peer_and_own_ones(ranks: Ranks, make) -> None:
    reader = ranks.reader
    ranks.attach()
    assert reader.store(store(0, (1, 3))) == {0: Outcome.OK}
    reader.poison()
    job = make(1, "request", (4, peer(2)), (6, 3))
    reader.step(loads=[job])
    assert reader.jobs() == {1: Outcome.OK}
    assert [block for block in range(8) if all(reader.holds(block))] == [4, 6]
    assert job.pairs[0, 1] == peer(2), "other ranks of the process take the same plan"


def test_an_arena_is_no_longer_read_once_a_plan_says_so(ranks: Ranks) -> None:
    ranks.attach()
    ranks.reader.step(windows=[Window(0, {})])
    assert ranks.reader.report().windows == {}
    ranks.reader.step(loads=[load(0, "request", (4, peer(2)))])
    report = ranks.reader.report()
    assert report.jobs == {0: Outcome.FAILED}
    assert report.windows is None


def test_a_drain_takes_changes(ranks: Ranks) -> None:
    ranks.attach()
    ranks.reader.drain(windows=[Window(0, {})])
    assert ranks.reader.report().windows == {}


def test_what_cannot_be_mapped_is_reported_as_empty(ranks: Ranks) -> None:
    """Also a seat whose number is too high for a window, and one of which this rank has no file."""
    files = {0: ranks.arena}
    ranks.reader.step(windows=[Window(64, files, SLOTS), Window(1, {0: "/dev/shm/no"}, SLOTS)])
    ranks.reader.step(windows=[Window(2, {1: ranks.arena}, SLOTS)])
    assert ranks.reader.report().windows == {64: (ranks.arena, 0), 1: ("/dev/shm/no", 0)}
    ranks.reader.step(windows=[Window(64, {})])
    assert ranks.reader.report().windows == {1: ("/dev/shm/no", 0)}


@pytest.mark.parametrize("num_slots", [8, 1 << 20])
def test_slots_are_numbered_as_the_arena_of_the_rank_has_them(num_slots: int) -> None:
    """Stages of a pipeline may have different numbers of slots, and get the same plan."""
    arenas = PeerArenas(0)
    arenas.windows = windows = Windows(4, num_slots, 64, None)
    slots = [(3, 0), (7, 0), (0, 5), (126, 2)]
    job = load(0, "request", *((i, seat << WINDOW_BITS | s) for i, (s, seat) in enumerate(slots)))
    (numbered,) = arenas.number([job])
    span = windows.window_slots
    assert numbered.pairs[:, 1].tolist() == [3, 7, 5 * span, 126 + 2 * span]
    far = load(0, "request", (1, 126 << WINDOW_BITS | 5))
    assert arenas.number([far])[0].pairs[0, 1] == min(126 * span + 5, MAX_SLOT)
    windows.release()


def test_an_arena_with_more_slots_than_plans_can_number_has_no_windows() -> None:
    assert count_windows((1 << WINDOW_BITS) + 1) == 0 < count_windows(1 << WINDOW_BITS)


def test_a_change_is_reported_each_time_it_is_asked_for(ranks: Ranks) -> None:
    """The report of the first time may have been lost."""
    ranks.attach()
    ranks.reader.step()
    assert ranks.reader.report().windows is None
    ranks.reader.step(windows=[Window(0, {0: ranks.arena}, SLOTS)])
    assert ranks.reader.report().windows == {0: (ranks.arena, SLOTS)}
    for _ in range(2):
        ranks.reader.step(windows=[Window(0, {})])
        assert ranks.reader.report().windows == {}
