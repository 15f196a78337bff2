"""What a disk, a limit, a crash or a flipped bit does: failed rows, never another block's bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kv_swap.tiers import disk
from kv_swap.tiers.record import PAGE_BYTES, RecordFormat
from kv_swap.tiers.region import read_description

from tests.support.processes import ROOT, run_code
from tests.support.tier_bed import ALIGNED, ODD, SECTORS, TierBed, flip, named

NAMES = named(8)


@pytest.mark.parametrize("slot_bytes", [ALIGNED, SECTORS, ODD])
def test_a_flipped_bit_is_a_mismatch_of_its_row_alone(tmp_path, slot_bytes):
    rng = np.random.default_rng(slot_bytes)
    with TierBed(tmp_path / "file", slot_bytes=slot_bytes) as bed:
        content = read_description(tmp_path / "file")
        for _ in range(40):
            assert bed.put(NAMES).failed == ()
            slot, bit = int(rng.integers(8)), int(rng.integers(8))
            # As often in the header as in the data; behind these nothing has a meaning.
            sizes = (0, 4096), (4096, slot_bytes)
            first, nbytes = sizes[int(rng.integers(2))]
            flip(tmp_path / "file", content.offset(slot) + first + int(rng.integers(nbytes)), bit)
            done = bed.get(NAMES)
            assert (done.failed, done.mismatches, done.error) == ((slot,), 1, None)
            assert done.nbytes == 7 * slot_bytes
            assert set(bed.right(NAMES)) >= set(NAMES) - {slot}


def test_control_without_verification_a_flipped_bit_arrives(tmp_path, monkeypatch):
    """So the comparison of the test above sees what verification prevents."""
    monkeypatch.setattr(RecordFormat, "verify", lambda *_: True)
    with TierBed(tmp_path / "file") as bed:
        bed.put(NAMES)
        flip(tmp_path / "file", read_description(tmp_path / "file").offset(3) + 4096 + 77)
        assert bed.get(NAMES).failed == ()
        assert bed.right(NAMES) == [0, 1, 2, 4, 5, 6, 7]


def test_a_name_of_another_generation_is_a_mismatch(tmp_path):
    with TierBed(tmp_path / "file") as bed:
        bed.put(NAMES)
        done = bed.get(NAMES | {2: b"newer " + NAMES[2], 6: NAMES[5]})
        assert (done.failed, done.mismatches, done.error) == ((2, 6), 2, None)


def test_slots_that_were_never_written_are_mismatches(tmp_path):
    with TierBed(tmp_path / "file") as bed:
        bed.put({0: NAMES[0]})
        assert bed.get(NAMES).failed == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("slot_bytes", [ALIGNED, ODD])
@pytest.mark.parametrize("left", [0, 4096, 6000])
def test_a_file_that_is_cut_while_it_is_open(tmp_path, slot_bytes, left):
    """`left` bytes are left of a record in the middle."""
    path = tmp_path / "file"
    with TierBed(path, slot_bytes=slot_bytes) as bed:
        bed.put(NAMES)
        size = read_description(path).offset(5) + left
        os.truncate(path, size)
        done = bed.get(NAMES)
        assert (done.failed, done.mismatches) == ((5, 6, 7), 0)
        assert f"the file has {size} of" in str(done.error)
        assert bed.right(NAMES) == [0, 1, 2, 3, 4]
        assert bed.put(NAMES).failed == ()
        assert bed.get(NAMES).failed == ()


LIMITED = """
import json, resource
from pathlib import Path
from kv_swap.tiers import disk
from kv_swap.tiers.region import read_description
from tests.support.tier_bed import TierBed, named
path, slot_bytes, disk.RETRY_SECONDS = {!r}, {}, {}
with TierBed(Path(path), slot_bytes=slot_bytes) as bed:
    content = read_description(Path(path))
    limit = content.offset(5) + 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    done = bed.put(named(8))
    print(json.dumps([done.failed, done.mismatches, str(done.error), bed.get(named(8)).failed]))
"""


@pytest.mark.parametrize("slot_bytes", [ALIGNED, ODD])
@pytest.mark.parametrize("retry_seconds", [5, 0])
def test_a_write_that_is_refused_fails_its_rows(tmp_path, slot_bytes, retry_seconds):
    """The file may not grow beyond the middle of a record: Linux cuts that write short."""
    said = run_code(LIMITED.format(str(tmp_path / "file"), slot_bytes, retry_seconds))
    failed, mismatches, error, unreadable = json.loads(said)
    assert (failed, mismatches) == ([5, 6, 7], 0)
    assert "File too large; raise `ulimit -f`" in error
    assert unreadable == [5, 6, 7]


def test_bad_sectors_fail_their_rows(bad_sectors):
    names, (bed, lose) = named(256), bad_sectors
    with bed:
        lose()
        done = bed.get(names)
        assert 20 < len(done.failed) < 236
        assert done.mismatches == 0
        assert "Input/output error; `dmesg` says whether the disk fails" in str(done.error)
        assert set(bed.right(names)) == set(names) - set(done.failed)
        # The filesystem makes the file of its disk longer.
        assert bed.put(names).failed == ()
        assert bed.get(names).failed == ()


def test_a_disk_that_takes_long_to_fail_is_not_asked_for_every_record(
    bad_sectors, read_calls, monkeypatch
):
    names, (bed, lose) = named(256), bad_sectors
    with bed:
        lose()
        once = bed.get(names)
        each = len(read_calls)
        monkeypatch.setattr(disk, "RETRY_SECONDS", 0)
        soon = bed.get(names)
        assert len(read_calls) - each < each
        assert set(soon.failed) >= set(once.failed)
        assert set(bed.right(names)) >= set(names) - set(soon.failed)


WRITER = """
import sys
from pathlib import Path
from tests.support.tier_bed import DEMOTE, TierBed, block, named
with TierBed(Path(sys.argv[1]), 32, slot_bytes=int(sys.argv[2])) as bed:
    names = [name for what in "ab" for name in named(16, sys.argv[3] + what).values()]
    bed.view[:] = [block(name, bed.slot_bytes) for name in names]
    print(bed.tier.continued, flush=True)
    while True:  # two blocks for each slot of the tier, in turns
        for half in (range(16), range(16, 32)):
            bed.run(DEMOTE, [(slot, slot % 16) for slot in half], [names[s] for s in half])
            print("wrote", flush=True)
"""


def records_of(path: Path) -> tuple[dict[int, bytes], list[int]]:
    """Return the names of the first 16 slots that have one, and the slots that are intact."""
    content = read_description(path)
    names, intact = {}, []
    with path.open("rb") as file:
        for slot in range(16):
            file.seek(content.offset(slot))
            header, data = file.read(PAGE_BYTES), file.read(content.slot_bytes)
            name = header[56 : 56 + int.from_bytes(header[12:16], "little")]
            if name:
                names[slot] = name
                if content.records.verify(header, data, name):
                    intact.append(slot)
    return names, intact


@pytest.mark.parametrize("slot_bytes", [256 << 10, (256 << 10) + 16], ids=["direct", "buffered"])
def test_a_writer_that_is_killed_leaves_whole_blocks_or_misses(tmp_path, slot_bytes):
    path = tmp_path / "file"
    rng = np.random.default_rng(slot_bytes)
    whole = 0
    for attempt in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(slot_bytes), f"{attempt}: "],
            cwd=ROOT,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == f"{attempt > 0}\n"
        for _ in range(rng.integers(1, 16)):  # however slow the machine is
            assert writer.stdout.readline() == "wrote\n"
        time.sleep(rng.uniform(0, 0.02))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        names, intact = records_of(path)
        with TierBed(path, 32, slot_bytes=slot_bytes) as bed:
            assert bed.tier.continued
            done = bed.get(names)
            served = [slot for row, slot in enumerate(names) if row not in done.failed]
            assert served == intact
            assert bed.right(names) == served
        whole += len(served)
    assert whole > 48
