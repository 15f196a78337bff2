"""Slots in a real Mooncake Store: what comes back, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from kv_swap.errors import JobError
from kv_swap.tiers.engine import TierCompletion
from kv_swap.tiers.remote.tier import NUM_SLOTS

from tests.support.mooncake import Master, Peer, environment, patient, require_mooncake
from tests.support.processes import ROOT
from tests.support.tier_bed import ALIGNED, DEMOTE, ODD, PROMOTE, MooncakeBed, block, job, named
from tests.transfer.tiers.conftest import tier_threads

SEGMENT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    require_mooncake()
    with Master() as master, patient():
        yield master


@pytest.fixture(scope="module")
def bed(master: Master) -> Iterator[MooncakeBed]:
    """A tier for all tests here, which takes a second to end."""
    with MooncakeBed(master.address, SEGMENT_BYTES, test="all") as bed:
        yield bed


@pytest.fixture
def no_thread_stays_behind() -> None:
    """Not after each test: `bed` has threads."""


@pytest.fixture(scope="module", autouse=True)
def no_thread_stays_at_all() -> Iterator[None]:
    yield
    assert not tier_threads()


@pytest.fixture
def names(request: pytest.FixtureRequest) -> dict[int, bytes]:
    """Names of a test's own for the slots of `bed`."""
    return named(8, request.node.name)


@pytest.mark.parametrize("slot_bytes", [ODD, 3 << 20])
def test_what_another_process_stored_comes_back(master, slot_bytes):
    names = named(8)
    with Peer(master.address, 8, slot_bytes), MooncakeBed(master.address, 0, 8, slot_bytes) as asks:
        done = asks.get(names)
        assert (done.failed, done.mismatches, done.error) == ((), 0, None)
        assert done.nbytes == 8 * slot_bytes
        assert asks.right(names) == list(names)


def test_rows_go_to_any_slots_and_one_block_to_several(bed, names):
    bed.put(names)
    bed.view[:] = 0
    into = [5, 2, 7, 0]
    wanted = [names[0], names[0], names[3], names[0]]
    done = bed.run(PROMOTE, [(slot, row) for row, slot in enumerate(into)], wanted)
    assert (done.failed, done.nbytes) == ((), 4 * ALIGNED)
    assert bed.right(dict(zip(into, wanted, strict=True))) == into
    assert not bed.view[[1, 3, 4, 6]].any()


def test_one_block_of_several_slots_is_stored_once(bed, names):
    bed.view[:2] = block(names[0], ALIGNED)
    assert bed.run(DEMOTE, [(0, 0), (1, 1)], [names[0]] * 2).failed == ()
    assert bed.get({4: names[0]}).failed == ()
    assert bed.right({4: names[0]}) == [4]


def test_two_write_the_same_and_a_job_takes_several_calls(master):
    names = named(64)
    with (
        MooncakeBed(master.address, SEGMENT_BYTES, 64, 1 << 19, test="both") as one,
        MooncakeBed(master.address, SEGMENT_BYTES, 64, 1 << 19, test="both") as other,
    ):
        results: list[TierCompletion] = []

        def put(bed: MooncakeBed) -> None:
            results.append(bed.put(names))

        threads = [threading.Thread(target=put, args=(bed,)) for bed in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [(done.failed, done.error) for done in results] == [((), None)] * 2
        for bed in (one, other):
            assert bed.get(names).failed == ()
            assert bed.right(names) == list(names)


def test_a_tier_without_slots_takes_rows_by_their_numbers(bed):
    assert bed.tier.num_slots == NUM_SLOTS
    with pytest.raises(JobError, match="slots 8 to 8 of the arena"):
        bed.tier.submit(job(1, DEMOTE, [(8, 0)], [b"a"]))


QUIET = """
from tests.support.tier_bed import MooncakeBed, named
bed = MooncakeBed({address!r}, {segment_bytes}, test="quiet")
print([len(bed.put(named(8)).failed), len(bed.get(named(8, "nobody")).failed)])
"""


def test_a_process_prints_nothing_and_ends_without_a_close(master):
    code = QUIET.format(address=master.address, segment_bytes=SEGMENT_BYTES)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 8]\n", "")


STRANGER = """
import os
from pathlib import Path
import numpy as np
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
from tests.support.tier_bed import MooncakeBed, named

bed = MooncakeBed({address!r}, {segment_bytes}, test="stranger")
assert bed.put(named(8)).failed == ()
open_one, shown = MooncakeDistributedStore(), np.full(4096, 7, np.uint8)
assert open_one.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", {address!r}) == 0
assert open_one.register_buffer(shown.ctypes.data, shown.nbytes) == 0

links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
lines = [line.split() for name in ("tcp", "tcp6")
         for line in Path("/proc/self/net", name).read_text().splitlines()[1:]]
ports = [int(line[1].rpartition(":")[2], 16) for line in lines
         if line[3] == "0A" and f"socket:[{{line[9]}}]" in links]

stranger, own = TransferEngine(), np.zeros(4096, np.uint8)
assert stranger.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert stranger.register_memory(own.ctypes.data, own.nbytes) == 0
for memory in (shown, bed.view):
    codes = [stranger.transfer_sync_read(f"127.0.0.1:{{port}}", own.ctypes.data,
                                         memory.ctypes.data, own.nbytes) for port in ports]
    print(0 in codes)
os._exit(0)
"""


def test_a_stranger_cannot_read_host_memory(master):
    """As he can what is registered, which the first line shows."""
    code = STRANGER.format(address=master.address, segment_bytes=SEGMENT_BYTES)
    done = subprocess.run(
        [sys.executable, "-u", "-c", code],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True\nFalse\n", done.stderr
