"""What a master, a peer, a network or a full store does: failed rows in time, never wrong bytes."""

from __future__ import annotations

import contextlib
import gc
import socket
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from kv_swap.tiers.remote import mooncake

from tests.support.mooncake import Master, Peer, patient, require_mooncake
from tests.support.tier_bed import DEMOTE, PROMOTE, MooncakeBed, job, named
from tests.support.waiting import wait_until
from tests.transfer.tiers.conftest import tier_threads

NAMES = named(8)
SEGMENT_BYTES = 64 << 20
IN_ENGINE = pytest.mark.slow
"""`tests/engine/test_mooncake.py` has this fault, and its effect on an engine, in `make test`."""


@pytest.fixture
def master() -> Iterator[Master]:
    require_mooncake()
    with Master() as master:
        yield master


@pytest.fixture
def hasty() -> Iterator[Master]:
    """A master that soon evicts what was read."""
    require_mooncake()
    with Master(lease_seconds=0.5) as master:
        yield master


def until_right(bed: MooncakeBed, names: dict[int, bytes]) -> None:
    """Demote and promote until that works, as engines do that leave a tier alone for a while."""
    wait_until(lambda: not bed.put(names).failed and not bed.get(names).failed)
    assert bed.right(names) == list(names)


def test_before_there_is_a_master_jobs_fail_and_the_first_after_it_works():
    require_mooncake()
    with (
        Master(starts=False) as master,
        patient(),
        MooncakeBed(master.address, SEGMENT_BYTES) as bed,
    ):
        done = bed.put(NAMES)
        assert (done.failed, done.mismatches) == (tuple(NAMES), 0)
        assert f"cannot reach the store at {master.address}" in str(done.error)
        assert "start mooncake_master there" in str(done.error)
        master.start()
        assert bed.put(NAMES).failed == ()
        assert bed.get(NAMES).failed == ()


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that drops what comes: a listener whose queue is full."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_network_that_drops_everything_does_not_hold_up_the_start(silent, monkeypatch):
    require_mooncake()
    monkeypatch.setattr(mooncake, "_PROBE_SECONDS", 0.5)
    began = time.perf_counter()
    with MooncakeBed(silent, SEGMENT_BYTES) as bed:
        started = time.perf_counter()
        done = bed.put(NAMES)
        assert 3 * (started - began) < time.perf_counter() - started < 60
        assert done.failed == tuple(NAMES)
        assert "timed out" in str(done.error)


def test_a_tier_that_moves_nothing_gives_its_memory(master):
    with MooncakeBed(master.address, SEGMENT_BYTES), MooncakeBed(master.address) as bed:
        until_right(bed, NAMES)


@IN_ENGINE
def test_a_master_is_killed_and_started_again(master):
    with MooncakeBed(master.address, SEGMENT_BYTES) as bed:
        until_right(bed, NAMES)
        master.kill()
        # Calls on connections that broke fail at once.
        while "the master is gone (-900)" not in str((done := bed.get(NAMES)).error):
            assert done.failed == tuple(NAMES)
        began = time.perf_counter()
        rows = [(slot, slot) for slot in NAMES]
        for number in range(12):
            direction = (DEMOTE, PROMOTE)[number % 2]
            bed.tier.submit(job(number, direction, rows, list(NAMES.values())))
        submitted = time.perf_counter() - began
        assert bed.tier.wait(60)
        # A connection that is made anew takes 4.3 s to fail. What was queued meanwhile fails then.
        assert 2 * submitted < time.perf_counter() - began < 20, "one by one they would take 26"
        completions = bed.tier.poll()
        assert sorted(done.job_id for done in completions) == list(range(12))
        for done in completions:
            assert (done.failed, done.mismatches) == (tuple(NAMES), 0)
            assert "the master is gone (-900)" in str(done.error)
        master.start()
        until_right(bed, NAMES)


@IN_ENGINE
def test_a_master_that_does_not_answer(master):
    with MooncakeBed(master.address, SEGMENT_BYTES) as bed:
        until_right(bed, NAMES)
        master.hold()
        began = time.perf_counter()
        done = bed.get(NAMES)
        assert time.perf_counter() - began < 20, "half a minute for each call"
        assert done.failed == tuple(NAMES)
        assert "the master does not answer (-901)" in str(done.error)
        master.go_on()
        until_right(bed, NAMES)


def test_a_read_that_takes_longer_than_its_lease_is_a_miss(hasty):
    """The bytes may be those of another object by then. It is no error: the next read may work."""
    with Peer(hasty.address) as peer, MooncakeBed(hasty.address) as bed:
        until_right(bed, NAMES)
        peer.hold()
        bed.tier.submit(job(1, PROMOTE, [(0, 0)], [NAMES[0]]))
        assert not bed.tier.wait(1)
        peer.go_on()
        assert bed.tier.wait(60)
        (done,) = bed.tier.poll()
        assert (done.failed, done.mismatches, done.error) == ((0,), 0, None)
        until_right(bed, NAMES)


def test_a_full_store_refuses_rows(hasty):
    names = named(24)
    with MooncakeBed(hasty.address, 16 << 20, 24, 1 << 20) as bed:
        until_right(bed, {0: names[0]})
        done = bed.put(names)
        assert 0 < len(done.failed) < 24
        assert (done.mismatches, done.error) == (0, None)
        stored = {slot: name for slot, name in names.items() if slot not in done.failed}
        found = bed.get(stored)
        assert set(bed.right(stored)) >= set(stored) - set(
            np.array(list(stored))[list(found.failed)]
        )
        # It evicts, and has room again.
        until_right(bed, {3: b"later"})


def test_a_store_without_memory_is_an_error(master):
    with MooncakeBed(master.address) as bed:
        done = bed.put(NAMES)
        assert done.failed == tuple(NAMES)
        assert "the store is full" in str(done.error)


def test_a_call_that_hangs_does_not_hold_up_a_close_and_keeps_the_arena(master):
    bed = MooncakeBed(master.address, SEGMENT_BYTES)
    until_right(bed, NAMES)
    owner = weakref.ref(bed.arena._owner)
    session = bed.client._session
    master.hold()
    for number in range(8):
        bed.tier.submit(job(number, PROMOTE, [(number, 0)], [NAMES[number]]))
    wait_until(lambda: session.calls == 2)
    began = time.perf_counter()
    bed.tier.close(timeout_seconds=0.3)
    # Mooncake's own close would hold all Python threads, for 4 s at least.
    assert time.perf_counter() - began < 3
    tier, bed = bed.tier, None  # type: ignore[assignment]
    gc.collect()
    assert owner() is not None
    looks, now = 10, time.perf_counter()
    while looks:
        if tier.wait(0.05):
            looks -= 1
            time.sleep(0.05)
        before, now = now, time.perf_counter()
        assert now - before < 3
        assert before - began < 60
    completions = tier.poll()
    assert sorted(done.job_id for done in completions) == list(range(8))
    master.go_on()
    for thread in tier_threads():
        thread.join(30)
    gc.collect()
    assert owner() is None, "nor does an error that somebody keeps"
    assert sum("does not answer" in str(done.error) for done in completions) == 2


@pytest.mark.slow
def test_bytes_that_come_late_do_not_reach_the_arena(master, monkeypatch):
    """Mooncake gives up a transfer after 60 s, and goes on with it if the peer does."""
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1000")
    with Peer(master.address) as peer, MooncakeBed(master.address) as bed:
        wait_until(lambda: not bed.get(NAMES).failed)
        bed.view[:] = 0
        peer.hold()
        bed.tier.submit(job(1, PROMOTE, [(s, s) for s in NAMES], list(NAMES.values())))
        assert bed.tier.wait(400)  # it may try another time, for as long
        assert bed.tier.poll()[0].failed == tuple(NAMES)
        peer.go_on()
        time.sleep(3)
        assert not bed.view.any()
        until_right(bed, NAMES)


def test_a_connection_that_was_given_up_is_made_anew(master, monkeypatch):
    """While another thread uses it: here every call gives it up."""
    monkeypatch.setattr(mooncake, "_UNSETTLED_SECONDS", 0)
    with patient(), Peer(master.address), MooncakeBed(master.address) as bed:
        for slot in range(4):
            bed.tier.submit(job(slot, PROMOTE, [(slot, 0)], [NAMES[slot]]))
        assert bed.tier.wait(100)
        assert [done.failed for done in bed.tier.poll()] == [()] * 4
        assert bed.right(NAMES) == [0, 1, 2, 3]
