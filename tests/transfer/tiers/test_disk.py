"""What a tier does with jobs, and how it ends."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_swap.errors import JobError, TierError
from kv_swap.tiers import disk
from kv_swap.tiers.disk import DiskTier
from kv_swap.tiers.engine import MAX_NAME_BYTES, TierCompletion, TierDirection, TierJob
from kv_swap.tiers.probe import find_filesystem

from tests.support.children import passes_in_a_child
from tests.support.tier_bed import ALIGNED, DEMOTE, ODD, PROMOTE, SECTORS, TierBed, job, named
from tests.transfer.tiers.conftest import tier_threads

SIZES = [512, SECTORS, ODD, ALIGNED, 3 * 4096]


@given(
    data=st.data(),
    slot_bytes=st.sampled_from(SIZES),
    chunk_slots=st.integers(1, 6),
    jobs=st.lists(st.integers(1, 12), min_size=1, max_size=5),
)
def test_blocks_come_back_under_their_names(tmp_path_factory, data, slot_bytes, chunk_slots, jobs):
    """Any slots in any order, to any slots; what was written last counts."""
    slots = st.permutations(range(12))
    held: dict[int, bytes] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "CHUNK_BYTES", chunk_slots * slot_bytes)
        bed = TierBed(tmp_path_factory.mktemp("tier") / "file", 12, slot_bytes)
    with bed:
        for number, count in enumerate(jobs):
            tier_slots = data.draw(slots)[:count]
            put = {slot: f"{number}: {slot}".encode() for slot in tier_slots}
            done = bed.put(put)
            assert (done.failed, done.nbytes, done.error) == ((), count * slot_bytes, None)
            held |= put
        order = {slot: held[slot] for slot in data.draw(slots) if slot in held}
        into = data.draw(slots)[: len(order)]
        bed.view[:] = 0
        done = bed.run(PROMOTE, list(zip(into, order, strict=True)), list(order.values()))
        assert done == TierCompletion(
            1, PROMOTE, (), 0, len(order) * slot_bytes, done.seconds, None
        )
        assert done.seconds > 0
        came = dict(zip(into, order.values(), strict=True))
        assert bed.right(came) == into
        rest = [slot for slot in range(12) if slot not in into]
        assert not bed.view[rest].any()


def test_an_arena_larger_or_smaller_than_the_tier(tmp_path):
    names = named(8)
    with TierBed(tmp_path / "file") as bed:
        bed.put(names)
    one = np.zeros((1, ALIGNED), np.uint8)
    with DiskTier(tmp_path / "file", 8, one, {}) as tier:
        assert tier.continued
        tier.submit(job(1, PROMOTE, [(0, 5)], [names[5]]))
        assert tier.wait(60)
        assert tier.poll()[0].failed == ()
    bed.view[0] = one[0]
    assert bed.right({0: names[5]}) == [0]


def test_io_is_direct_where_slots_and_filesystem_allow_it(tmp_path):
    def can(slot_bytes: int) -> bool:
        with TierBed(tmp_path / str(slot_bytes), slot_bytes=slot_bytes) as bed:
            return bed.tier.direct

    try:
        os.close(os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        assert not can(ALIGNED)
    else:
        assert can(ALIGNED)
    assert not can(ODD)


def cached_bytes(path: Path) -> int:
    """Return how much of a file lies in the page cache."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(address, len(mapped), pages.ctypes.data) == 0
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


@pytest.mark.parametrize("slot_bytes", [1 << 18, (1 << 18) + 16], ids=["direct", "buffered"])
def test_the_page_cache_is_left_to_others(tmp_path, slot_bytes):
    """What was moved does not lie in memory a second time."""
    if find_filesystem(tmp_path) == "tmpfs":
        pytest.skip("a tmpfs is the page cache")
    with TierBed(tmp_path / "file", 64, slot_bytes) as bed:
        for move in (bed.put, bed.get):
            assert move(named(64)).failed == ()
            assert cached_bytes(tmp_path / "file") < 12 << 20  # of 16; some was read ahead


@pytest.mark.parametrize(
    ("pairs", "names", "message"),
    [
        ([(0, 8)], [b"a"], "slots 8 to 8 of the tier, valid are 0 to 7"),
        ([(1, 1), (-1, 0)], [b"a", b"b"], "slots -1 to 1 of the arena, valid are 0 to 7"),
        ([(0, 0)], [], "0 names for 1 pairs"),
        ([(0, 0)], [b""], "0 to 0 bytes"),
        ([(0, 0)], [bytes(MAX_NAME_BYTES + 1)], "valid are 1 to 1024"),
        (np.zeros((0, 2), np.int32), [], "int32 array of shape"),
        ([(0, 0, 0)], [b"a"], "int32 array of shape"),
        (np.zeros((1, 2), np.int64), [b"a"], "int32 array of shape"),
    ],
)
def test_bad_jobs_are_refused(tmp_path, pairs, names, message):
    pairs = pairs if isinstance(pairs, np.ndarray) else np.array(pairs, np.int32)
    with TierBed(tmp_path / "file") as bed:
        for direction in TierDirection:
            with pytest.raises(JobError, match=message):
                bed.tier.submit(TierJob(1, direction, pairs, names))
        assert bed.tier.in_flight == 0


def test_no_slot_is_written_twice_but_any_is_read_twice(tmp_path):
    names = [b"a", b"a"]
    with TierBed(tmp_path / "file") as bed:
        with pytest.raises(JobError, match="a demote writes one slot twice"):
            bed.tier.submit(job(1, DEMOTE, [(0, 3), (1, 3)], names))
        with pytest.raises(JobError, match="a promote writes one slot twice"):
            bed.tier.submit(job(1, PROMOTE, [(3, 0), (3, 1)], names))
        assert bed.run(DEMOTE, [(3, 0), (3, 1)], names).failed == ()
        assert bed.run(PROMOTE, [(0, 1), (1, 1)], names).failed == ()


def test_the_longest_name_counts_to_its_last_byte(tmp_path):
    name = bytes(MAX_NAME_BYTES - 1) + b"x"
    with TierBed(tmp_path / "file") as bed:
        bed.put({0: name})
        assert bed.get({0: name}).failed == ()
        assert bed.get({0: name[:-1] + b"y"}).mismatches == 1
        assert bed.get({0: name[:-1]}).mismatches == 1


def test_the_caller_may_reuse_pairs_and_names(tmp_path, reads):
    with TierBed(tmp_path / "file") as bed:
        bed.put(named(8))
        names = list(named(8).values())
        for slot in range(4):
            bed.tier.submit(job(slot, PROMOTE, [(slot, slot)], [names[slot]]))
            assert reads.reached.acquire(timeout=60)
        # Every thread is held, so nobody has looked at this job when it is changed.
        later = job(4, PROMOTE, [(slot, slot) for slot in range(4, 8)], names[4:])
        bed.tier.submit(later)
        later.pairs[:] = 0
        names[4:] = [b"another"] * 4
        reads.opened.set()
        assert bed.tier.wait(60)
        assert [done.failed for done in bed.tier.poll()] == [()] * 5
        assert bed.right({slot: named(8)[slot] for slot in range(4, 8)}) == [4, 5, 6, 7]


def test_each_completion_is_delivered_once(tmp_path):
    with TierBed(tmp_path / "file") as bed:
        for number in range(20):
            bed.tier.submit(job(number, DEMOTE, [(0, number % 8)], [b"a"]))
        assert bed.tier.wait(60)
        assert bed.tier.wait(0)
        assert bed.tier.in_flight == 20
        assert sorted(done.job_id for done in bed.tier.poll()) == list(range(20))
        assert bed.tier.in_flight == 0
        assert bed.tier.poll() == []


def test_a_promotion_does_not_wait_for_demotions(tmp_path, writes):
    names = named(8)
    with TierBed(tmp_path / "file") as bed:
        bed.put(names)
        writes.opened.clear()
        for number in range(10):
            bed.tier.submit(job(number, DEMOTE, [(0, number % 4)], [b"a"]))
        bed.tier.submit(job(10, PROMOTE, [(7, 7)], [names[7]]))
        while not (completions := bed.tier.poll()):
            pass
        assert [done.job_id for done in completions] == [10]
        assert not bed.tier.wait(0.01)
        writes.opened.set()


def test_all_threads_share_a_job(tmp_path, reads):
    with TierBed(tmp_path / "file", 8) as bed:
        bed.put(named(8))
        bed.tier.submit(job(1, PROMOTE, [(s, s) for s in range(8)], list(named(8).values())))
        for _ in range(4):
            assert reads.reached.acquire(timeout=60)
        reads.opened.set()


def test_neighbours_in_the_file_are_one_call(tmp_path, read_calls):
    with TierBed(tmp_path / "file", 12) as bed:
        bed.put(named(12))
        read_calls.clear()
        wanted = {slot: named(12)[slot] for slot in (6, 1, 11, 9, 0, 7)}
        assert bed.get(wanted).failed == ()
    # Six rows for four threads: shares of two, in the order of the file.
    assert sorted(nbytes // (ALIGNED + 4096) for nbytes in read_calls) == [1, 1, 2, 2]


def test_small_slots_are_as_many_to_a_call_as_the_system_takes(tmp_path, read_calls):
    with TierBed(tmp_path / "file", 1500, 512) as bed:
        assert bed.put(named(1500)).failed == ()
        read_calls.clear()
        assert bed.get(named(1500)).failed == ()
    assert len(read_calls) == 5  # of 341 at most: three buffers each, and Linux takes 1,024


def test_closing_gives_up_what_has_not_begun(tmp_path, reads):
    names = named(8)
    bed = TierBed(tmp_path / "file")
    bed.put(names)
    for number in range(6):
        bed.tier.submit(job(number, PROMOTE, [(number, number)], [names[number]]))
    for _ in range(4):
        assert reads.reached.acquire(timeout=60)
    bed.tier.close(timeout_seconds=0.01)
    reads.opened.set()
    bed.tier.close()
    completions = {done.job_id: done for done in bed.tier.poll()}
    assert {number for number, done in completions.items() if not done.failed} == {0, 1, 2, 3}
    assert [completions[number].failed for number in (4, 5)] == [(0,), (0,)]
    assert "closed before" in str(completions[5].error)
    with pytest.raises(JobError, match="closed"):
        bed.tier.submit(job(9, PROMOTE, [(0, 0)], [b"a"]))


def test_a_read_that_hangs_keeps_the_arena_and_the_file(tmp_path, reads):
    """It may yet write the one, and a write that hangs the other."""
    bed = TierBed(tmp_path / "file")
    bed.put(named(8))
    owner = weakref.ref(bed.arena._owner)
    bed.tier.submit(job(1, PROMOTE, [(0, 0)], [b"a"]))
    assert reads.reached.acquire(timeout=60)
    bed.tier.close(timeout_seconds=0.1)
    del bed
    gc.collect()
    assert owner() is not None
    (thread,) = tier_threads()
    with pytest.raises(TierError, match="in use by another engine"):
        TierBed(tmp_path / "file")
    reads.opened.set()
    thread.join(60)
    gc.collect()
    assert owner() is None
    with TierBed(tmp_path / "file") as again:
        assert again.tier.continued


def test_a_tier_that_is_dropped_in_mid_read_ends_by_itself(tmp_path, reads):
    bed = TierBed(tmp_path / "file")
    names = named(8)
    bed.put(names)
    arena, owner = bed.view, weakref.ref(bed.arena._owner)
    bed.view[:] = 0
    bed.tier.submit(job(1, PROMOTE, [(3, 3)], [names[3]]))
    assert reads.reached.acquire(timeout=60)
    del bed
    gc.collect()
    reads.opened.set()
    for thread in tier_threads():
        thread.join(60)
    assert arena[3].any()
    del arena
    gc.collect()
    assert owner() is None


def test_a_completion_does_not_keep_the_arena(tmp_path):
    bed = TierBed(tmp_path / "file")
    owner = weakref.ref(bed.arena._owner)
    os.truncate(tmp_path / "file", 1 << 16)
    done = bed.get({0: b"a"})
    assert done.error is not None
    bed.tier.close()
    del bed
    gc.collect()
    assert owner() is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_may_drop_a_tier(tmp_path):
    bed = TierBed(tmp_path / "file")
    bed.put(named(8))

    def drop() -> None:
        nonlocal bed
        del bed
        gc.collect()

    assert passes_in_a_child(drop)
    assert bed.get(named(8)).failed == ()
    bed.tier.close()
