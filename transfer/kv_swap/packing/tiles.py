"""Packs and unpacks tiles with NumPy, the reference for the kernels, byte for byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_swap.packing.format import (
    ESCAPE_BYTES,
    ESCAPE_CODES,
    FORMAT_VERSION,
    GREATEST_CODE,
    GROUP_VALUES,
    HEADER,
    KIND_PACKED,
    KIND_RAW,
    MAGIC,
    MAIN_BYTES,
    MANTISSA_BYTES,
    PACKED_TILE_BYTES,
    POOL_ENTRY_BYTES,
    STRIPS,
    TILE_BYTES,
    TILE_GROUPS,
    TileColumns,
    escape_capacity,
)

_ESCAPED = np.array(ESCAPE_CODES, np.uint8).view(np.uint64)[0]
"""The codes of a group that escapes, one byte each."""

_NO_CODE = np.uint64(0xF0F0_F0F0_F0F0_F0F0)

_BY_STRIPS = np.arange(TILE_GROUPS).reshape(4, STRIPS, 32).transpose(1, 0, 2).ravel()
"""The groups in the order in which their escapes are stored."""

_BASES = MAIN_BYTES + HEADER.itemsize

_CHUNK_TILES = 32
"""Tiles processed at a time, so that their temporary arrays stay in the cache."""


def pack_tiles(
    tiles: NDArray[np.uint8], columns: TileColumns
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Pack `(n, TILE_BYTES)` into `(n, PACKED_TILE_BYTES)`; also return which tiles fit, `(n,)`.

    The result for a tile that does not fit is undefined: write such a tile with `make_raw`.
    """
    packed = np.zeros((len(tiles), PACKED_TILE_BYTES), np.uint8)
    fits = np.empty(len(tiles), np.bool_)
    for first in range(0, len(tiles), _CHUNK_TILES):
        part = slice(first, first + _CHUNK_TILES)
        fits[part] = _pack(np.ascontiguousarray(tiles[part]), columns, packed[part])
    return packed, fits


def count_escapes(tiles: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.int64]:
    """Return the number of groups that escape in each tile of `(n, TILE_BYTES)`, shape `(n,)`."""
    counts = []
    for first in range(0, len(tiles), _CHUNK_TILES):
        part = np.ascontiguousarray(tiles[first : first + _CHUNK_TILES])
        _, exponents = _split(part)
        _, escaping, _ = _encode(exponents, _bases(exponents, columns), columns)
        counts.append(escaping.sum(axis=1))
    return np.concatenate(counts)


def _pack(
    tiles: NDArray[np.uint8], columns: TileColumns, packed: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    mantissas, exponents = _split(tiles)
    bases = _bases(exponents, columns)
    codes, escaping, zeros = _encode(exponents, bases, columns)
    joined = codes[:, :, :4] | codes[:, :, 4:] << 4
    packed[:, :MANTISSA_BYTES] = mantissas.reshape(len(tiles), -1)
    packed[:, MANTISSA_BYTES:MAIN_BYTES] = joined.reshape(len(tiles), -1)
    packed[:, _BASES : _BASES + columns.count] = bases
    counts = escaping.sum(axis=1)
    fits: NDArray[np.bool_] = counts <= escape_capacity(columns.count)
    escapes = packed[:, _BASES + columns.count :].reshape(len(packed), -1, ESCAPE_BYTES)
    by_strips = escaping[:, _BY_STRIPS]
    tile, place = np.nonzero(by_strips & fits[:, None])
    firsts = np.cumsum(np.where(fits, counts, 0)) - np.where(fits, counts, 0)
    escapes[tile, np.arange(len(tile)) - firsts[tile]] = exponents[tile, _BY_STRIPS[place]]
    header = np.zeros(len(tiles), HEADER)
    header["magic"] = MAGIC
    header["version"] = FORMAT_VERSION
    header["kind"] = KIND_PACKED
    header["escapes"] = counts
    header["zeros_or_entry"] = (zeros << np.arange(zeros.shape[1])).sum(axis=1)
    of_strips = by_strips.reshape(len(tiles), STRIPS, -1).sum(axis=2)
    header["escapes_before"] = np.cumsum(of_strips, axis=1)[:, :-1]
    packed[:, MAIN_BYTES:_BASES] = header.view(np.uint8).reshape(len(tiles), -1)
    return fits


def _split(tiles: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return signs with mantissas, and exponents, both `(n, TILE_GROUPS, GROUP_VALUES)`."""
    words = tiles.view(np.uint32)
    halves = (words << 1 | words >> 31).view(np.uint8)
    halves = halves.reshape(len(tiles), TILE_GROUPS, GROUP_VALUES, 2)
    return halves[..., 0], np.ascontiguousarray(halves[..., 1])


def _bases(exponents: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.uint8]:
    """Return the bases of all columns, shape `(n, count)`; 1 for a column without groups."""
    greatest = exponents.max(axis=2)[:, columns.order]
    greatest = np.maximum.reduceat(greatest, columns.firsts, axis=1)
    bases = np.ones((len(exponents), columns.count), np.uint8)
    bases[:, columns.used] = np.maximum(greatest, GREATEST_CODE + 1) - GREATEST_CODE
    return bases


def _encode(
    exponents: NDArray[np.uint8], bases: NDArray[np.uint8], columns: TileColumns
) -> tuple[NDArray[np.uint8], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return codes, one byte each, `(n, TILE_GROUPS, GROUP_VALUES)`; which groups escape, `(n,
    TILE_GROUPS)`; and which runs of 32 groups have an exponent 0, `(n, TILE_GROUPS // 32)`.
    """
    # An exponent below the base wraps around to 16 or more, since no base is above 240.
    codes = exponents - bases[:, columns.of_group, None]
    zeros = np.zeros((len(exponents), TILE_GROUPS // 32), np.bool_)
    if not exponents.all():
        zero = exponents == 0
        zeros = zero.reshape(len(exponents), TILE_GROUPS // 32, -1).any(axis=2)
        # In a run with an exponent 0, no other exponent has code 0.
        codes[np.repeat(zeros, 32, axis=1)[:, :, None] & (codes == 0)] = 0xFF
        codes[zero] = 0
    groups = codes.view(np.uint64)[:, :, 0]
    escaping: NDArray[np.bool_] = ((groups & _NO_CODE) != 0) | (groups == _ESCAPED)
    groups[escaping] = _ESCAPED
    return codes, escaping, zeros


def make_raw(
    tile: NDArray[np.uint8], packed: NDArray[np.uint8], entry: NDArray[np.uint8], index: int
) -> None:
    """Write a tile that does not fit packed: part to its place, part to pool entry `index`."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["kind"] = MAGIC, FORMAT_VERSION, KIND_RAW
    header["zeros_or_entry"] = index
    packed[:MAIN_BYTES] = tile[:MAIN_BYTES]
    packed[MAIN_BYTES:_BASES] = header.view(np.uint8)
    packed[_BASES:] = 0
    entry[:] = tile[MAIN_BYTES:]


def read_headers(packed: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return the headers of `(n, PACKED_TILE_BYTES)`, shape `(n,)` of dtype `HEADER`.

    Raises `ValueError` unless all are tiles of this format version.
    """
    headers = np.ascontiguousarray(packed[:, MAIN_BYTES:_BASES]).view(HEADER)[:, 0]
    kinds = (headers["kind"] == KIND_PACKED) | (headers["kind"] == KIND_RAW)
    known = (headers["magic"] == MAGIC) & (headers["version"] == FORMAT_VERSION) & kinds
    if not known.all():
        wrong = headers[~known][0]
        raise ValueError(
            f"a slot holds no packed KV of version {FORMAT_VERSION}: a tile has magic "
            f"{int(wrong['magic']):#06x}, version {wrong['version']} and kind {wrong['kind']}"
        )
    return headers


def unpack_tiles(packed: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.uint8]:
    """Unpack `(n, PACKED_TILE_BYTES)`, none of which may be raw, into `(n, TILE_BYTES)`."""
    tiles = np.empty((len(packed), TILE_BYTES), np.uint8)
    for first in range(0, len(packed), _CHUNK_TILES):
        part = slice(first, first + _CHUNK_TILES)
        tiles[part] = _unpack(np.ascontiguousarray(packed[part]), columns)
    return tiles


def _unpack(packed: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.uint8]:
    num_tiles = len(packed)
    joined = packed[:, MANTISSA_BYTES:MAIN_BYTES].reshape(num_tiles, TILE_GROUPS, 4)
    codes = np.concatenate([joined & 0xF, joined >> 4], axis=2)
    bases = packed[:, _BASES : _BASES + columns.count][:, columns.of_group, None]
    exponents = codes + bases
    headers = np.ascontiguousarray(packed[:, MAIN_BYTES:_BASES]).view(HEADER)[:, 0]
    if headers["zeros_or_entry"].any():
        zeros = headers["zeros_or_entry"][:, None] >> np.arange(TILE_GROUPS) // 32 & 1 != 0
        exponents[zeros[:, :, None] & (codes == 0)] = 0
    escaped = codes.view(np.uint64)[:, :, 0] == _ESCAPED
    by_strips = escaped[:, _BY_STRIPS]
    tile, place = np.nonzero(by_strips)
    rank = (np.cumsum(by_strips, axis=1) - 1)[tile, place]
    escapes = packed[:, _BASES + columns.count :].reshape(num_tiles, -1, ESCAPE_BYTES)
    exponents[tile, _BY_STRIPS[place]] = escapes[tile, np.minimum(rank, escapes.shape[1] - 1)]
    halves = np.empty((num_tiles, MANTISSA_BYTES, 2), np.uint8)
    halves[:, :, 0] = packed[:, :MANTISSA_BYTES]
    halves[:, :, 1] = exponents.reshape(num_tiles, -1)
    rotated = halves.reshape(num_tiles, -1).view(np.uint32)
    return (rotated >> 1 | rotated << 31).view(np.uint8)


def read_raw(packed: NDArray[np.uint8], entry: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a raw tile, shape `(TILE_BYTES,)`, from its place and its pool entry."""
    assert entry.shape == (POOL_ENTRY_BYTES,)
    return np.concatenate([packed[:MAIN_BYTES], entry])
