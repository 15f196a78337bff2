"""The format of a record, read as its specification says."""

from __future__ import annotations

import numpy as np
import xxhash
from kv_swap.tiers.record import RecordFormat
from kv_swap.tiers.region import read_description

from tests.support.tier_bed import ODD, TierBed, block

RECORDS = RecordFormat(bytes(range(16)), ODD)


def test_a_record_on_the_disk_is_what_the_specification_says(tmp_path):
    with TierBed(tmp_path / "file", slot_bytes=ODD) as bed:
        bed.put({2: b"name"})
        file_id = bytes.fromhex(bed.tier.file_id)
    data = (tmp_path / "file").read_bytes()
    record = data[65536 + 2 * (4096 + 8192) :][: 4096 + ODD]
    assert record[:8] == b"KVRECORD"
    assert record[8:24] == b"".join(n.to_bytes(4, "little") for n in (1, 4, ODD, 0))
    assert record[24:40] == file_id
    assert record[40:56] == xxhash.xxh3_128_digest(block(b"name", ODD))
    assert record[56:60] == b"name"
    assert not any(record[60:4080])
    assert record[4080:4096] == xxhash.xxh3_128_digest(record[:4080])
    assert record[4096:] == block(b"name", ODD).tobytes()


def test_a_file_begins_as_the_specification_says(tmp_path):
    with TierBed(tmp_path / "file", model="a") as bed:
        file_id = bed.tier.file_id
    head = (tmp_path / "file").read_bytes()[:65536]
    assert head[:8] == b"KVTIERS\0"
    nbytes = int.from_bytes(head[8:16], "little")
    assert head[16:32] == xxhash.xxh3_128_digest(head[32 : 32 + nbytes])
    assert not any(head[32 + nbytes :])
    described = read_description(tmp_path / "file")
    assert (described.file_id, described.description) == (file_id, {"model": "a"})


def test_no_bit_of_a_header_may_change():
    data = block(b"name", ODD)
    header = np.frombuffer(RECORDS.header(b"name", data), np.uint8).copy()
    for place in range(4096):
        header[place] ^= 1 << place % 8
        assert not RECORDS.verify(header, data, b"name"), place
        header[place] ^= 1 << place % 8
    assert RECORDS.verify(header, data, b"name")


def test_what_a_record_is_to_one_who_looks_for_a_name():
    data = block(b"name", ODD)
    header = RECORDS.header(b"name", data)
    assert RECORDS.verify(header, data, b"name")
    assert not RECORDS.verify(header, data, b"another")
    assert not RECORDS.verify(header, block(b"another", ODD), b"name")
    assert not RECORDS.verify(bytes(4096), data, b"name")
    for other in (RecordFormat(bytes(16), ODD), RecordFormat(RECORDS.file_id, ODD + 16)):
        assert not other.verify(header, data, b"name")
