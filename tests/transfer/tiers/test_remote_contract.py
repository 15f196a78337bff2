"""What every remote store does for a tier: a shared folder, S3 and Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.errors import TierError
from kv_swap.tiers.record import PAGE_BYTES, RecordFormat
from kv_swap.tiers.remote import s3
from kv_swap.tiers.remote.client import Fate, object_keys
from kv_swap.tiers.remote.folder import FolderClient
from kv_swap.tiers.remote.mooncake import MooncakeClient
from kv_swap.tiers.remote.s3 import S3Client

from tests.support.mooncake import Master, patient, require_mooncake
from tests.support.s3_server import BUCKET, S3Server, require_s3
from tests.support.tier_bed import (
    ALIGNED,
    DEMOTE,
    ODD,
    PROMOTE,
    FolderBed,
    MooncakeBed,
    S3Bed,
    block,
    named,
)
from tests.transfer.tiers.conftest import tier_threads

RECORD_BYTES = PAGE_BYTES + ALIGNED
PLENTY = 1 << 40
URL = f"s3://{BUCKET}/prefix"


class Files:
    """A store whose objects are files, which a test may read and write."""

    smallest = 0

    def __init__(self, make_client: Any, make_bed: Any, folder: Path) -> None:
        self.client, self.bed, self._folder = make_client, make_bed, folder

    def _file(self, key: str) -> Path:
        (found,) = self._folder.rglob(Path(key).name)
        return found

    def read(self, key: str) -> bytes:
        return self._file(key).read_bytes()

    def write(self, key: str, content: bytes) -> None:
        self._file(key).write_bytes(content)


class Mooncake:
    """A Mooncake Store, and a client that writes into it what it likes."""

    smallest = 1

    def __init__(self, address: str) -> None:
        self.client = partial(MooncakeClient, address, 0)
        self.bed = partial(MooncakeBed, address, 64 << 20)
        self._memory = np.zeros(2 * RECORD_BYTES, np.uint8)
        self._raw = self.client()
        self._raw.connect()

    def _part(self, nbytes: int) -> list[tuple[int, int]]:
        return [(self._memory.ctypes.data, nbytes)]

    def read(self, key: str) -> bytes:
        assert self._raw.get([key], [self._part(RECORD_BYTES)]) == [Fate.DONE]
        return self._memory[:RECORD_BYTES].tobytes()

    def write(self, key: str, content: bytes) -> None:
        self._raw.remove([key])
        self._memory[: len(content)] = np.frombuffer(content, np.uint8)
        assert self._raw.put([key], [self._part(len(content))]) == [Fate.DONE]

    def close(self) -> None:
        self._raw.close()


@pytest.fixture(scope="module", params=["folder", "s3", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "folder":
        make_client: Callable[..., Any] = partial(FolderClient, folder, PLENTY)
        yield Files(make_client, partial(FolderBed, folder), folder)
    elif request.param == "s3":
        require_s3()
        with S3Server(folder) as server, pytest.MonkeyPatch.context() as patch:
            for name, value in server.variables.items():
                patch.setenv(name, value)
            for name in ("CONNECT_SECONDS", "REQUEST_SECONDS"):
                patch.setattr(s3, name, 60)  # other tests take the server's time
            yield Files(partial(S3Client, URL, PLENTY), partial(S3Bed, URL), folder)
    else:
        require_mooncake()
        with Master() as master, patient():
            mooncake = Mooncake(master.address)
            yield mooncake
            mooncake.close()
    assert not tier_threads()


@pytest.fixture(scope="module")
def bed(store):
    """A tier for all tests of a store: Mooncake's takes a second to end."""
    with store.bed(model="one") as bed:
        yield bed


@pytest.fixture
def no_thread_stays_behind() -> None:
    """Not after each test: `bed` has threads."""


@pytest.fixture
def names(request: pytest.FixtureRequest) -> dict[int, bytes]:
    """Names of a test's own for the slots of `bed`."""
    return named(8, request.node.name)


@pytest.fixture
def keys(bed, names):
    return object_keys(bed.tier.file_id, list(names.values()))


@pytest.mark.parametrize("slot_bytes", [ODD, 3 << 20])
def test_what_one_engine_has_written_another_one_reads(store, slot_bytes, names):
    with store.bed(8, slot_bytes) as one, store.bed(8, slot_bytes) as other:
        done = one.put(names)
        assert (done.failed, done.error, done.nbytes) == ((), None, 8 * slot_bytes)
        done = other.get(names)
        assert (done.failed, done.mismatches, done.error) == ((), 0, None)
        assert done.nbytes == 8 * slot_bytes
        assert other.right(names) == list(names)


def test_what_nobody_has_written_fails_without_an_error(bed, names):
    bed.put({slot: names[slot] for slot in (1, 2)})
    done = bed.get(names)
    assert (done.failed, done.mismatches, done.error) == ((0, 3, 4, 5, 6, 7), 0, None)
    assert done.nbytes == 2 * ALIGNED
    assert set(bed.right(names)) >= {1, 2}


def test_what_is_there_is_not_written_again(bed, names):
    assert bed.put({slot: names[slot] for slot in (0, 1, 2)}).nbytes == 3 * ALIGNED
    done = bed.put(names)
    assert (done.failed, done.nbytes) == ((), 5 * ALIGNED)


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


@pytest.mark.parametrize(
    ("slot_bytes", "description"),
    [(ALIGNED, {"model": "other"}), (ALIGNED, {"part": "1 of 2"}), (2 * ALIGNED, {})],
)
def test_other_descriptions_and_sizes_share_nothing(store, bed, names, slot_bytes, description):
    bed.put(names)
    with store.bed(8, slot_bytes, **{"model": "one", **description}) as stranger:
        done = stranger.get(names)
        assert (done.failed, done.mismatches) == (tuple(names), 0)
        assert stranger.tier.file_id != bed.tier.file_id


def flip(store: Any, key: str, offset: int) -> None:
    content = bytearray(store.read(key))
    content[offset] ^= 1
    store.write(key, bytes(content))


def check_mismatch(bed: Any, names: dict[int, bytes], slot: int) -> None:
    """Check that one block is not what it should be: it is removed, and can be written again."""
    done = bed.get(names)
    assert (done.failed, done.mismatches, done.error) == ((slot,), 1, None)
    assert set(bed.right(names)) >= set(names) - {slot}
    alone = bed.get({slot: names[slot]})
    assert (alone.failed, alone.mismatches, alone.error) == ((0,), 0, None)
    assert bed.put(names).nbytes == ALIGNED
    assert bed.get(names).failed == ()


@pytest.mark.parametrize("offset", [0, 60, PAGE_BYTES, RECORD_BYTES - 1])
def test_a_flipped_bit_is_a_mismatch_and_is_written_again(store, bed, names, keys, offset):
    bed.put(names)
    flip(store, keys[3], offset)
    check_mismatch(bed, names, 3)


@pytest.mark.parametrize("size", [0, PAGE_BYTES, RECORD_BYTES - 1, RECORD_BYTES + 1])
def test_another_size_is_a_mismatch_and_is_written_again(store, bed, names, keys, size):
    """Mooncake says of a shorter one what it says where its memory is gone."""
    bed.put(names)
    content = store.read(keys[2]) + b"\0"
    store.write(keys[2], content[: max(size, store.smallest)])
    check_mismatch(bed, names, 2)


def test_another_block_in_its_place_is_a_mismatch_and_is_written_again(store, bed, names, keys):
    bed.put(names)
    store.write(keys[2], store.read(keys[1]))
    check_mismatch(bed, names, 2)


def test_control_without_verification_a_flipped_bit_arrives(store, bed, names, keys, monkeypatch):
    """So the tests above see what verification prevents."""
    monkeypatch.setattr(RecordFormat, "verify", lambda *_: True)
    bed.put(names)
    flip(store, keys[3], PAGE_BYTES + 77)
    assert bed.get(names).failed == ()
    assert bed.right(names) == [0, 1, 2, 4, 5, 6, 7]


def test_a_client_without_a_tier_says_what_is_there_until_it_is_closed(store, bed, names, keys):
    """As a scheduler's does."""
    client = store.client()
    client.connect()
    bed.put({2: names[2]})
    assert client.exist(keys) == [slot == 2 for slot in names]
    assert client.exist([]) == []
    client.close()
    client.close()
    with pytest.raises(TierError, match="closed"):
        client.exist(["a"])
