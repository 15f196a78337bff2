"""Which file a tier goes on with, begins afresh, or refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash
from kv_swap.errors import TierError
from kv_swap.tiers import file
from kv_swap.tiers.region import read_description

from tests.support.processes import ROOT, run_code
from tests.support.tier_bed import ALIGNED, TierBed, flip, named
from tests.transfer.tiers.conftest import Gate

NAMES = named(8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that has a block in each of its 8 slots."""
    with TierBed(tmp_path / "file", model="a", rank="0") as bed:
        assert not bed.tier.continued
        assert bed.tier.reason == "there is no file yet"
        assert bed.put(NAMES).failed == ()
    return tmp_path / "file"


def write_region(path: Path, text: bytes) -> None:
    """Have a file say this of itself, where `region.py` specifies it."""
    with path.open("r+b") as file:
        file.seek(8)
        file.write(len(text).to_bytes(8, "little") + xxhash.xxh3_128_digest(text) + text)


def region(path: Path) -> dict[str, Any]:
    head = path.read_bytes()[: 1 << 16]
    found: dict[str, Any] = json.loads(head[32 : 32 + int.from_bytes(head[8:16], "little")])
    return found


def test_a_file_goes_on(path):
    file_id = read_description(path).file_id
    with TierBed(path, model="a", rank="0") as bed:
        assert (bed.tier.continued, bed.tier.reason) == (True, "")
        assert bed.tier.file_id == file_id
        assert bed.get(NAMES).failed == ()
        assert bed.right(NAMES) == list(NAMES)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"slot_bytes": 8192}, "its slots have 16384 bytes, 8192 are wanted"),
        ({"num_slots": 9}, "it has 8 slots, 9 are wanted"),
        ({"num_slots": 7}, "it has 8 slots, 7 are wanted"),
        ({"model": "b"}, "its model is 'a', 'b' is wanted"),
        ({"dtype": "fp8"}, "its dtype is None, 'fp8' is wanted"),
    ],
    ids=["slot size", "more slots", "fewer slots", "description", "more description"],
)
def test_what_does_not_fit_is_begun_afresh_and_nothing_of_it_is_served(path, how, reason):
    file_id = read_description(path).file_id
    with TierBed(path, **{"model": "a", "rank": "0", **how}) as bed:
        assert (bed.tier.continued, bed.tier.reason) == (False, reason)
        assert bed.tier.file_id != file_id
        assert path.stat().st_size == read_description(path).nbytes
        names = dict(list(NAMES.items())[:7])
        assert bed.get(names).mismatches == 7
        assert bed.put(names).failed == ()
        assert bed.get(names).failed == ()


@pytest.mark.parametrize(
    ("offset", "changes", "reason"),
    [
        (0, {"format": 2}, "describes no file of this version: Expected `int` <= 1"),
        (40, {}, "its first region is damaged"),
    ],
)
def test_a_file_that_does_not_say_what_it_is_is_begun_afresh(path, offset, changes, reason):
    write_region(path, json.dumps(region(path) | changes).encode())
    if offset:
        flip(path, offset)
    with pytest.raises(TierError, match=reason):
        read_description(path)
    with TierBed(path, model="a", rank="0") as bed:
        assert reason in bed.tier.reason
        assert bed.get(NAMES).mismatches == 8


def test_records_of_another_file_are_not_served(path, tmp_path):
    """As if somebody had put the ranks' files in each other's places, under the right head."""
    with TierBed(tmp_path / "other", model="a", rank="1") as bed:
        assert bed.put(NAMES).failed == ()
    data = (tmp_path / "other").read_bytes()
    with path.open("r+b") as file:
        file.seek(1 << 16)
        file.write(data[1 << 16 :])
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.continued
        assert bed.get(NAMES).mismatches == 8


def test_a_file_that_was_cut_goes_on_with_what_is_left(path, caplog):
    content = read_description(path)
    os.truncate(path, content.offset(5) + 7000)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.continued
        assert "it was cut" in caplog.text
        done = bed.get(NAMES)
        assert (done.failed, done.mismatches) == ((5, 6, 7), 3)
        assert bed.right(NAMES) == [0, 1, 2, 3, 4]
        assert path.stat().st_blocks * 512 >= content.nbytes


def test_the_file_takes_all_its_space_and_is_for_its_user_alone(path):
    status = path.stat()
    assert status.st_size == (1 << 16) + 9 * (4096 + ALIGNED)
    assert status.st_blocks * 512 >= status.st_size
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_two_engines_do_not_share_a_file(path):
    with TierBed(path, model="a", rank="0") as bed:
        with pytest.raises(TierError, match=r"in use by another engine.*its own folder"):
            TierBed(path, model="b")
        assert bed.get(NAMES).failed == ()
    code = "import sys; from pathlib import Path; from tests.support.tier_bed import TierBed; {}"
    command = "bed = TierBed(Path(sys.argv[1]), model='a', rank='0'); print(flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code.format(command), str(path)],
        cwd=ROOT,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    assert other.stdout.readline()
    with pytest.raises(TierError, match="in use by another engine"):
        TierBed(path, model="a", rank="0")
    other.kill()
    other.communicate()
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.get(NAMES).failed == ()


# -- what cannot be a tier's file ------------------------------------------------------------------


def test_a_file_of_somebody_else_is_left_alone(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(100_000))
    with pytest.raises(TierError, match=r"no tier has made it; it is left as it is"):
        TierBed(path)
    assert path.read_bytes() == bytes(100_000)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe", "not a regular file"),
        ("", "Is a directory; name a file in that folder"),
        ("socket", "cannot open"),
        ("gone/file", "No such file or directory; make the folder"),
        ("text/file", "Not a directory; name a folder that exists"),
    ],
)
def test_what_cannot_be_a_file_is_refused_and_left(tmp_path, name, message):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(TierError, match=message):
            TierBed(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(TierError, match=f"Permission denied; let user {os.geteuid()}"):
            TierBed(tmp_path / "file")
    finally:
        os.seteuid(user)


def test_a_filesystem_without_the_space_is_left_as_it_is(small, monkeypatch):
    monkeypatch.setattr(file, "_SPACE_SECONDS", 0.1)
    with pytest.raises(TierError, match=r"needs \d+ more bytes .* has \d+ free: free space"):
        TierBed(small / "file", num_slots=400)
    assert list(small.iterdir()) == []
    with TierBed(small / "file", num_slots=40) as bed:
        bed.put(named(40))
    with pytest.raises(TierError, match="free space, or use fewer slots"):
        TierBed(small / "file", num_slots=400)
    with TierBed(small / "file", num_slots=40) as bed:
        assert bed.get(named(40)).failed == ()


def test_a_filesystem_that_is_read_only_is_named(small):
    with TierBed(small / "file"):
        pass
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(TierError, match="Read-only file system; mount it writable"):
        TierBed(small / "file")
    assert read_description(small / "file").num_slots == 8


def test_a_limit_on_the_size_of_files_is_named(tmp_path):
    code = (
        "import resource; from pathlib import Path; from tests.support.tier_bed import TierBed; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768)); TierBed(Path({!r}))"
    )
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_code(code.format(str(tmp_path / "file")))
    assert "File too large; raise `ulimit -f`, or use fewer slots" in caught.value.stderr
    assert not (tmp_path / "file").exists()


def test_a_description_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(TierError, match=r"takes \d+ bytes, at most 65504 fit"):
        TierBed(tmp_path / "file", model="a" * (1 << 16))
    assert not (tmp_path / "file").exists()


def test_a_tier_has_at_least_one_slot(tmp_path):
    with TierBed(tmp_path / "file", num_slots=1) as bed:
        bed.put({0: b"a"})
        assert bed.get({0: b"a"}).failed == ()
    with pytest.raises(TierError, match="at least 1 slot, got 0"):
        type(bed.tier)(tmp_path / "none", 0, bed.view, {})
    assert not (tmp_path / "none").exists()


def test_a_file_is_removed_and_its_space_is_free(path):
    taken = path.stat().st_blocks * 512
    with path.open("rb") as reader:  # such as `kv-offload tier`
        assert file.remove_file(path) == taken
        assert not path.exists()
        assert os.fstat(reader.fileno()).st_blocks == 0
    assert file.remove_file(path) == 0


def test_who_removes_a_file_waits_for_another_that_is_doing_so(path, monkeypatch):
    monkeypatch.setattr(file, "_REMOVAL_SECONDS", 60)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: (path.unlink(), fcntl.flock(other, fcntl.LOCK_UN))).start()
        assert file.remove_file(path) == 0


def test_a_link_to_another_disk_stays_and_the_space_there_is_free(path):
    link = path.with_name("rank-3.kv")
    link.symlink_to(path)
    assert file.remove_file(link) > 0
    assert file.remove_file(link) == 0
    assert path.stat().st_blocks == 0
    with TierBed(link, model="a", rank="3") as bed:
        assert bed.put(NAMES).failed == ()
    assert path.stat().st_blocks > 0


def test_a_file_whose_removal_was_cut_short_is_removed(path):
    os.truncate(path, 0)
    assert file.remove_file(path) == 0
    assert not path.exists()


def test_a_file_that_is_removed_while_it_is_opened_is_made_anew(path, monkeypatch):
    """By an engine with fewer ranks: in a file without a name no restart finds anything."""
    lock, removed = fcntl.flock, []

    def remove_first(fd: int, how: int) -> None:
        if not removed:
            removed.append(path)
            file.remove_file(path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.reason == "there is no file yet"
        bed.put(NAMES)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.continued
        assert bed.get(NAMES).failed == ()


def test_a_file_in_use_and_one_of_somebody_else_are_not_removed(path, tmp_path, monkeypatch):
    monkeypatch.setattr(file, "_REMOVAL_SECONDS", 0.1)
    with TierBed(path, model="a", rank="0"), pytest.raises(TierError, match="in use by another"):
        file.remove_file(path)
    other = tmp_path / "other"
    other.write_bytes(b"somebody's")
    with pytest.raises(TierError, match="no tier has made it"):
        file.remove_file(other)
    assert other.exists()
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.continued


# -- a file whose id is revoked ----------------------------------------------------------------


def test_after_a_revocation_this_tier_continues_and_no_later_one_believes_a_record(path):
    file_id = read_description(path).file_id
    with TierBed(path, model="a", rank="0") as bed:
        assert [bed.tier.revoke(60), bed.tier.revoke(60)] == ["", ""]
        revoked = read_description(path).file_id
        assert revoked != file_id == bed.tier.file_id
        assert bed.get(NAMES).failed == ()
        assert bed.put(NAMES).failed == ()
        assert bed.get(NAMES).failed == ()
    assert bed.tier.revoke(60) == f"{path} is closed"
    with TierBed(path, model="a", rank="0") as bed:
        assert (bed.tier.continued, bed.tier.file_id) == (True, revoked)
        assert bed.get(NAMES).mismatches == len(NAMES)
        assert bed.put(NAMES).failed == ()
        assert bed.get(NAMES).failed == ()


def test_a_revocation_that_cannot_be_flushed_is_told_and_can_be_tried_again(path, monkeypatch):
    with TierBed(path, model="a", rank="0") as bed:
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EIO, "a bad disk")))
            said = bed.tier.revoke(60)
            assert said == f"cannot write {path}: a bad disk; `dmesg` says whether the disk fails"
        assert bed.tier.revoke(60) == ""


def test_a_revocation_waits_for_a_disk_that_hangs_and_no_longer_than_it_is_told(path, monkeypatch):
    """Its descriptor keeps the file locked: it may yet write there."""
    flush = Gate(os.fsync)
    monkeypatch.setattr(os, "fsync", flush)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.revoke(0.05) == f"{path} could not be written within 0.05 s"
        flush.reached.acquire()
        assert bed.tier.revoke(0.05) != ""
    with pytest.raises(TierError, match="is in use by another engine"):
        TierBed(path, model="a", rank="0")
    flush.opened.set()
    for thread in threading.enumerate():
        if thread.name == "kv-swap-revoke":
            thread.join(60)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.get(NAMES).mismatches == len(NAMES)


# -- files that are well-formed and odd, or of somebody else -----------------------------------

GOOD = {"file_id": "ab" * 16, "slot_bytes": ALIGNED, "num_slots": 8, "description": {}, "format": 1}
ODD_REGIONS = {
    "a list": [1],
    "null": None,
    "a key more": {**GOOD, "more": 1},
    "a key less": {name: value for name, value in GOOD.items() if name != "num_slots"},
    "a description that is a list": {**GOOD, "description": [1]},
    "a description of numbers": {**GOOD, "description": {"model": 1}},
    "no JSON": b"xx",
    "an id that is no hexadecimal number": {**GOOD, "file_id": "zz" * 16},
    "an id of another length": {**GOOD, "file_id": "ab"},
    "no slots": {**GOOD, "num_slots": 0},
    "true for a number": {**GOOD, "num_slots": True},
    "more bytes than a file can have": {**GOOD, "slot_bytes": 1 << 70},
    "lists in lists": b"[" * 60000,
    "a number without end": b"1" * 60000,
    "no text": b"\xff\xfe\xff",
}


@pytest.mark.parametrize("document", ODD_REGIONS.values(), ids=ODD_REGIONS)
def test_a_first_region_that_describes_no_file_is_begun_afresh(path, document):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    write_region(path, text)
    with pytest.raises(TierError, match=r"describes no file of .*; an engine would start it over"):
        read_description(path)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.reason.startswith("its first region describes no file of this version: ")
        assert bed.get(NAMES).mismatches == len(NAMES)


@pytest.mark.parametrize("place", [*range(8), 8, 15, 20, 40])
def test_a_flipped_bit_in_the_first_region_has_it_begun_afresh(path, place):
    """Also one in the magic: all else says that it is a file of a tier."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.tier.reason == "its first region is damaged"
        assert bed.get(NAMES).mismatches == len(NAMES)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("content", [b"", None])
def test_a_file_of_another_user_is_refused(path, content):
    if content is not None:
        path.write_bytes(content)
    before = path.read_bytes()
    os.chown(path, 65534, 65534)
    with pytest.raises(TierError, match=r"belongs to user 65534, .*, and this is user 0: remove"):
        TierBed(path, model="a", rank="0")
    assert (path.read_bytes(), path.stat().st_uid) == (before, 65534)


def test_a_file_that_others_could_use_is_for_its_user_alone_from_then_on(path, caplog):
    """As one that was copied without its mode."""
    path.chmod(0o664)
    with TierBed(path, model="a", rank="0") as bed:
        assert bed.get(NAMES).failed == ()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"{path} could be used by other users, with mode 664: it is 600 now" in caplog.text
