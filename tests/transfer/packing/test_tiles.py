"""Tiles of any bits come back; their bytes are those that `format.py` says."""

from __future__ import annotations

import numpy as np
import pytest
from kv_swap.packing.format import (
    FORMAT_VERSION,
    PACKED_TILE_BYTES,
    POOL_ENTRY_BYTES,
    TILE_BYTES,
    TILE_GROUPS,
    Packing,
    TileColumns,
    escape_capacity,
    tile_columns,
)
from kv_swap.packing.tiles import (
    count_escapes,
    make_raw,
    pack_tiles,
    read_headers,
    read_raw,
    unpack_tiles,
)
from numpy.typing import NDArray

from tests.support.packed_kv import (
    hostile_tiles,
    normal_tiles,
    random_tiles,
    tiles_of_codes,
    tiles_with_escapes,
    tiles_with_zeros,
)
from tests.support.slow import rest_is_slow

PACKINGS = [Packing(1), Packing(8), Packing(16, 256), Packing(128), Packing(200), Packing(1, 1)]


def columns_of(packing: Packing) -> TileColumns:
    return tile_columns(packing, 0)


def read_by_hand(packed: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.uint16]:
    """Read a packed tile value by value, as the format is written down: uint16 of `(8192,)`."""
    data = packed.tobytes()
    assert data[12288:12292] == b"KV" + bytes([FORMAT_VERSION, 1])
    zeros = int.from_bytes(data[12292:12296], "little")
    escapes = data[12296]
    count = columns.count
    first_escape = 12304 + count
    words = np.empty(TILE_BYTES // 2, np.uint16)
    used = 0
    before = []
    with_zeros = set()
    strips = [
        (strip, quarter * 256 + strip * 32 + lane)
        for strip in range(8)
        for quarter in range(4)
        for lane in range(32)
    ]
    for strip, group in strips:
        if len(before) == strip:
            before.append(used)
        joined = data[8192 + 4 * group : 8196 + 4 * group]
        codes = [code & 15 for code in joined] + [code >> 4 for code in joined]
        base = data[12304 + int(columns.of_group[group])]
        has_zeros = zeros >> group // 32 & 1
        exponents = [0 if has_zeros and code == 0 else code + base for code in codes]
        if codes == [0, 1, 1, 1, 1, 1, 1, 1]:
            start = first_escape + 8 * used
            exponents = list(data[start : start + 8])
            used += 1
            least = base + has_zeros
            no_code = [0 < exponent < least or exponent > base + 15 for exponent in exponents]
            first = 0 if has_zeros else base
            assert any(no_code) or exponents == [first, *[base + 1] * 7]
        if 0 in exponents:
            with_zeros.add(group // 32)
        for pair in range(4):
            at = 8 * group + 2 * pair
            low, high = data[at], data[at + 1]
            word = low | exponents[2 * pair] << 8 | high << 16 | exponents[2 * pair + 1] << 24
            word = word >> 1 | (word & 1) << 31
            words[at : at + 2] = word & 0xFFFF, word >> 16
    assert used == escapes
    assert list(data[12297:12304]) == before[1:]
    assert zeros == sum(1 << number for number in with_zeros)
    assert not any(data[first_escape + 8 * used :])
    exponents_of = words.reshape(-1, 8) >> 7 & 0xFF
    for column in range(count):
        own = exponents_of[columns.of_group == column]
        assert data[12304 + column] == max(int(own.max(initial=0)), 16) - 15
    return words


def check_round_trip(tiles: NDArray[np.uint8], packing: Packing) -> NDArray[np.bool_]:
    """Pack, and unpack what fits; return which tiles do."""
    columns = columns_of(packing)
    packed, fits = pack_tiles(tiles, columns)
    escapes, capacity = count_escapes(tiles, columns), escape_capacity(columns.count)
    np.testing.assert_array_equal(fits, escapes <= capacity)
    np.testing.assert_array_equal(unpack_tiles(packed[fits], columns), tiles[fits])
    assert (read_headers(packed[fits])["kind"] == 1).all()
    return fits


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_bytes_are_those_of_the_format(packing):
    columns = columns_of(packing)
    sure = [normal_tiles(1), tiles_with_escapes([0, 1, escape_capacity(columns.count)])]
    tiles = np.concatenate([*sure, tiles_with_zeros(4), tiles_of_codes(16), hostile_tiles()])
    packed, fits = pack_tiles(tiles, columns)
    assert fits[:4].all()
    assert 12 < fits.sum() < len(tiles)
    for tile, bytes_ in zip(tiles[fits], packed[fits], strict=True):
        np.testing.assert_array_equal(read_by_hand(bytes_, columns), tile.view(np.uint16))


@pytest.mark.parametrize("position", rest_is_slow([0, 7, *range(1, 7)], 2))
def test_every_pattern_in_a_group_that_escapes(position):
    """65,536 patterns, each beside a value that is far smaller, in tiles of the same exponent."""
    columns = columns_of(Packing(1))
    capacity = escape_capacity(columns.count)
    exponents = np.arange(256, dtype=np.uint16) << 7
    alike = np.arange(128, dtype=np.uint16)[:, None] | np.array([0, 0x8000], np.uint16)
    per_exponent = -(-alike.size // capacity)
    num_escapes = 0
    for exponent in exponents:
        words = np.full((per_exponent, TILE_GROUPS, 8), exponent | 0x55, np.uint16)
        tile, place = np.divmod(np.arange(alike.size), capacity)
        words[tile, 7 * place, position] = exponent | alike.ravel()
        words[tile, 7 * place, (position + 1) % 8] = 0x0081
        tiles = words.view(np.uint8).reshape(per_exponent, TILE_BYTES)
        packed, fits = pack_tiles(tiles, columns)
        assert fits.all()
        np.testing.assert_array_equal(unpack_tiles(packed, columns), tiles)
        num_escapes += int(read_headers(packed)["escapes"].sum())
    # The exponent 1 has a code beside those up to 16, but not beside 0. In one place it and seven
    # times 2 have the codes of groups that escape.
    assert num_escapes == alike.size * (256 - 16 + (position == 7))


@pytest.mark.parametrize("position", rest_is_slow([0, 7, *range(1, 7)], 2))
def test_every_pattern_in_the_window_of_its_column(position):
    """Each pattern among values of its exponent, or a few more: it has a code, and no escape."""
    columns = columns_of(Packing(1))
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)  # half an exponent
    words = np.repeat(patterns.astype(np.uint16), TILE_GROUPS // 64, axis=1)[:, :, None]
    words = np.repeat(words, 8, axis=2)
    for step in (0, 7, 13, 15):
        near = words.copy()
        exponent = near >> 7 & 0xFF
        others = np.minimum(exponent + step, 255) << 7 | (near & 0x807F)
        near[:] = others.astype(np.uint16)
        near[:, :, position] = words[:, :, position]
        tiles = near.view(np.uint8).reshape(len(near), TILE_BYTES)
        packed, _ = pack_tiles(tiles, columns)
        assert not count_escapes(tiles, columns).any()
        np.testing.assert_array_equal(unpack_tiles(packed, columns), tiles)


@pytest.mark.parametrize("packing", PACKINGS)
def test_random_and_hostile_bits_come_back_or_do_not_fit(packing):
    assert not check_round_trip(random_tiles(16), packing).any()
    assert check_round_trip(hostile_tiles(), packing).sum() >= 12
    assert check_round_trip(normal_tiles(64), packing).all()
    check_round_trip(tiles_with_zeros(30), packing)
    check_round_trip(tiles_of_codes(300), packing)


@pytest.mark.parametrize("packing", PACKINGS)
def test_escapes_from_none_to_more_than_fit(packing):
    counts = list(range(61))
    fits = check_round_trip(tiles_with_escapes(counts), packing)
    capacity = escape_capacity(columns_of(packing).count)
    assert 38 <= capacity <= 45
    assert fits.tolist() == [count <= capacity for count in counts]


def test_a_channel_that_is_far_greater_has_a_base_of_its_own():
    """With one base for all of a tile the other values escape."""
    words = normal_tiles(4).view(np.uint16).reshape(4, -1, 128)
    words[:, :, 5] += 9 << 7
    tiles = words.view(np.uint8).reshape(4, TILE_BYTES)
    assert check_round_trip(tiles, Packing(16)).all()
    assert not check_round_trip(tiles, Packing(1)).any()


@pytest.mark.parametrize("nothing", [0, 0x8000, 1, 0x807F])
def test_channels_that_are_zero_make_nothing_escape(nothing):
    """Nor do zeros by themselves, and groups of zeros alone."""
    words = np.full((1, 64, 128), 0x3F80, np.uint16)
    words[:, :, [3, 64, 71, *range(80, 88)]] = nothing
    words[:, ::7, 5] = nothing
    words[:, :, 6] -= 14 << 7
    tiles = words.view(np.uint8).reshape(1, TILE_BYTES)
    assert check_round_trip(tiles, Packing(16)).all()
    columns = columns_of(Packing(16))
    assert count_escapes(tiles, columns).tolist() == [0]
    (packed,), _ = pack_tiles(tiles, columns)
    assert packed[12292:12296].tolist() == [0xFF] * 4
    assert packed[8192 + 4 * 10 : 8192 + 4 * 11].tolist() == [0] * 4


def test_the_base_has_a_code_only_where_none_of_32_groups_has_a_zero():
    words = np.full((1, TILE_GROUPS, 8), 0x3F80, np.uint16)
    words[:, 10::16, 2] -= 15 << 7
    words[:, 256 + 32 * 5, 4] = 0
    tiles = words.view(np.uint8).reshape(1, TILE_BYTES)
    columns = columns_of(Packing(1))
    packed, fits = pack_tiles(tiles, columns)
    assert fits.all()
    # Zeros in groups 416 to 447, which are in strip 5; two escapes.
    assert packed[0, 12292:12304].tolist() == [0, 1 << 5, 0, 0, 2, 0, 0, 0, 0, 0, 2, 2]
    np.testing.assert_array_equal(unpack_tiles(packed, columns), tiles)


@pytest.mark.parametrize(
    ("first", "others", "escapes"),
    [
        (112, 113, True),
        (112, 114, False),
        (112, 112, False),
        (113, 113, False),
        (0, 113, True),
        (0, 114, False),
    ],
)
def test_a_group_whose_codes_say_that_it_escaped_does(first, others, escapes):
    """The base is 112."""
    words = np.full((1, TILE_GROUPS, 8), 127 << 7, np.uint16)
    words[:, 7] = others << 7
    words[:, 7, 0] = first << 7
    tiles = words.view(np.uint8).reshape(1, TILE_BYTES)
    assert check_round_trip(tiles, Packing(1)).all()
    assert count_escapes(tiles, columns_of(Packing(1))).tolist() == [escapes]


def test_equal_tiles_have_equal_bytes():
    tiles = tiles_with_escapes([5] * 40)
    tiles[20:] = tiles[:20]
    packed, _ = pack_tiles(tiles, columns_of(Packing(16)))
    np.testing.assert_array_equal(packed[:20], packed[20:])
    np.testing.assert_array_equal(packed[3:4], pack_tiles(tiles[3:4], columns_of(Packing(16)))[0])


@pytest.mark.parametrize("where", [0, 8191, 8192, 12287, 12304, 12304 + 16])
def test_a_packed_byte_that_flips_is_seen(where):
    """The control: if this passed through unseen, the other tests would show nothing."""
    columns = columns_of(Packing(16))
    tiles = tiles_with_escapes([20])
    packed, fits = pack_tiles(tiles, columns)
    assert fits.all()
    packed[0, where] ^= 0x10
    assert (unpack_tiles(packed, columns) != tiles).any()


@pytest.mark.parametrize("where", [12288, 12289, 12290, 12291])
def test_what_is_no_tile_is_refused(where):
    packed, _ = pack_tiles(normal_tiles(2), columns_of(Packing(16)))
    read_headers(packed)
    packed[1, where] += 3
    with pytest.raises(ValueError, match=f"no packed KV of version {FORMAT_VERSION}"):
        read_headers(packed)


def test_a_raw_tile_lies_in_its_place_and_in_the_pool():
    (tile,) = random_tiles(1)
    packed = np.full(PACKED_TILE_BYTES, 0xAA, np.uint8)
    entry = np.empty(POOL_ENTRY_BYTES, np.uint8)
    make_raw(tile, packed, entry, 3)
    np.testing.assert_array_equal(packed[:12288], tile[:12288])
    np.testing.assert_array_equal(entry, tile[12288:])
    assert packed[12288:].tobytes() == b"KV\x02\x02\x03\x00\x00\x00" + bytes(376)
    np.testing.assert_array_equal(read_raw(packed, entry), tile)
    assert read_headers(packed[None])["zeros_or_entry"] == 3
