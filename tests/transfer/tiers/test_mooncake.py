"""A real Mooncake Store, besides `test_remote_contract`: two that write, quiet ends, strangers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from kv_swap.tiers.engine import TierCompletion

from tests.support.mooncake import Master, environment, patient, require_mooncake
from tests.support.processes import ROOT
from tests.support.tier_bed import MooncakeBed, named

SEGMENT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    require_mooncake()
    with Master() as master, patient():
        yield master


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


QUIET = """
from tests.support.tier_bed import MooncakeBed, named
bed = MooncakeBed({0!r}, {1}, test="quiet")
print([len(bed.put(named(8)).failed), len(bed.get(named(8, "nobody")).failed)])
"""


def run(master: Master, code: str) -> subprocess.CompletedProcess[str]:
    """Run statements in a process that gives the store memory."""
    return subprocess.run(
        [sys.executable, "-u", "-c", code.format(master.address, SEGMENT_BYTES)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_process_prints_nothing_and_ends_without_a_close(master):
    done = run(master, QUIET)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 8]\n", "")


STRANGER = """
import os
from pathlib import Path
import numpy as np
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
from tests.support.tier_bed import MooncakeBed, named

bed = MooncakeBed({0!r}, {1}, test="stranger")
assert bed.put(named(8)).failed == ()
open_one, shown = MooncakeDistributedStore(), np.full(4096, 7, np.uint8)
assert open_one.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", {0!r}) == 0
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
    done = run(master, STRANGER)
    assert done.stdout == "True\nFalse\n", done.stderr
