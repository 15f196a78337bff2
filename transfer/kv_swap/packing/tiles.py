"""Packs and unpacks tiles with NumPy: what the kernels are compared with, byte for byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_swap.packing.columns import TileColumns
from kv_swap.packing.format import (
    ESCAPE_BYTES,
    FORMAT_VERSION,
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
    escape_capacity,
)

_EXPONENT_ONES = np.uint32(0x0080_0080)
"""The least bit of both exponents of a word."""

_BY_STRIPS = np.arange(TILE_GROUPS).reshape(4, STRIPS, 32).transpose(1, 0, 2).ravel()
"""The groups in the order of their escapes."""

_BASES = MAIN_BYTES + HEADER.itemsize

_CHUNK_TILES = 32
"""Tiles handled at once: their temporary arrays stay in a cache."""


def pack_tiles(
    tiles: NDArray[np.uint8], columns: TileColumns
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Pack `(n, TILE_BYTES)` into `(n, PACKED_TILE_BYTES)`, and say which tiles fit, `(n,)`.

    What is returned of a tile that does not fit says nothing; `make_raw` stores it.
    """
    packed = np.zeros((len(tiles), PACKED_TILE_BYTES), np.uint8)
    fits = np.empty(len(tiles), np.bool_)
    for first in range(0, len(tiles), _CHUNK_TILES):
        part = slice(first, first + _CHUNK_TILES)
        fits[part] = _pack(np.ascontiguousarray(tiles[part]), columns, packed[part])
    return packed, fits


def count_escapes(tiles: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.int64]:
    """Return how many groups escape in each of `(n, TILE_BYTES)`: `(n,)`."""
    counts = [
        _escaping(_split(np.ascontiguousarray(tiles[first : first + _CHUNK_TILES]), columns)[1])
        for first in range(0, len(tiles), _CHUNK_TILES)
    ]
    return np.concatenate([escaping.sum(axis=1) for escaping in counts])


def _pack(
    tiles: NDArray[np.uint8], columns: TileColumns, packed: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    mantissas, exponents, bases = _split(tiles, columns)
    escaping = _escaping(exponents)
    codes = exponents.view(np.uint32)
    codes = np.where(escaping, 0, codes[:, 0::2] | codes[:, 1::2] << 4)
    packed[:, :MANTISSA_BYTES] = mantissas
    packed[:, MANTISSA_BYTES:MAIN_BYTES] = np.ascontiguousarray(codes).view(np.uint8)
    packed[:, _BASES : _BASES + columns.count] = bases
    counts = escaping.sum(axis=1)
    fits: NDArray[np.bool_] = counts <= escape_capacity(columns.count)
    escapes = packed[:, _BASES + columns.count :].reshape(len(packed), -1, ESCAPE_BYTES)
    by_strips = escaping[:, _BY_STRIPS]
    tile, place = np.nonzero(by_strips & fits[:, None])
    firsts = np.cumsum(np.where(fits, counts, 0)) - np.where(fits, counts, 0)
    by_group = exponents.reshape(len(tiles), TILE_GROUPS, GROUP_VALUES)
    escapes[tile, np.arange(len(tile)) - firsts[tile]] = by_group[tile, _BY_STRIPS[place]]
    header = np.zeros(len(tiles), HEADER)
    header["magic"] = MAGIC
    header["version"] = FORMAT_VERSION
    header["kind"] = KIND_PACKED
    header["columns"] = columns.count
    header["escapes"] = counts
    of_strips = by_strips.reshape(len(tiles), STRIPS, -1).sum(axis=2)
    header["escapes_before"] = np.cumsum(of_strips, axis=1) - of_strips
    packed[:, MAIN_BYTES:_BASES] = header.view(np.uint8).reshape(len(tiles), -1)
    return fits


def _split(
    tiles: NDArray[np.uint8], columns: TileColumns
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Return sign and mantissa, exponents less bases, both `(n, 8192)`, and bases `(n, count)`."""
    magnitudes = tiles.view(np.uint16).reshape(len(tiles), TILE_GROUPS, GROUP_VALUES) & 0x7FFF
    greatest = magnitudes.max(axis=2)[:, columns.order]
    greatest = np.maximum.reduceat(greatest, columns.firsts, axis=1) >> 7
    bases = np.zeros((len(tiles), columns.count), np.uint8)
    bases[:, columns.used] = np.maximum(greatest, 14) - 14
    words = tiles.view(np.uint32).reshape(len(tiles), TILE_GROUPS, -1)
    words = words - _shift(bases, columns)[:, :, None]
    halves = (words << 1 | words >> 31).view(np.uint8).reshape(len(tiles), -1, 2)
    return np.ascontiguousarray(halves[:, :, 0]), np.ascontiguousarray(halves[:, :, 1]), bases


def _shift(bases: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.uint32]:
    """Return what is subtracted from the words of each group, `(n, 1024)`."""
    return (bases[:, columns.of_group].astype(np.uint32) - np.uint32(1)) * _EXPONENT_ONES


def _escaping(exponents: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which groups escape, `(n, 1024)`."""
    groups = exponents.view("<u8")
    escaping: NDArray[np.bool_] = ((groups & 0xF0F0_F0F0_F0F0_F0F0) != 0) | ((groups & 0xFF) == 0)
    return escaping
    return escaping


def make_raw(
    tile: NDArray[np.uint8], packed: NDArray[np.uint8], entry: NDArray[np.uint8], index: int
) -> None:
    """Write a tile that does not fit into its place and the pool's entry of this index."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["kind"] = MAGIC, FORMAT_VERSION, KIND_RAW
    header["pool_entry"] = index
    packed[:MAIN_BYTES] = tile[:MAIN_BYTES]
    packed[MAIN_BYTES:_BASES] = header.view(np.uint8)
    packed[_BASES:] = 0
    entry[:] = tile[MAIN_BYTES:]


def read_headers(packed: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return the headers of `(n, PACKED_TILE_BYTES)`: `(n,)` of `HEADER`.

    Raises `ValueError` for what is no tile of this version.
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
    """Unpack `(n, PACKED_TILE_BYTES)`, of which none is raw, into `(n, TILE_BYTES)`."""
    tiles = np.empty((len(packed), TILE_BYTES), np.uint8)
    for first in range(0, len(packed), _CHUNK_TILES):
        part = slice(first, first + _CHUNK_TILES)
        tiles[part] = _unpack(np.ascontiguousarray(packed[part]), columns)
    return tiles


def _unpack(packed: NDArray[np.uint8], columns: TileColumns) -> NDArray[np.uint8]:
    num_tiles = len(packed)
    codes = packed[:, MANTISSA_BYTES:MAIN_BYTES].reshape(num_tiles, TILE_GROUPS, 4)
    exponents = np.concatenate([codes & 0xF, codes >> 4], axis=2)
    escaping = exponents[:, :, 0] == 0
    by_strips = escaping[:, _BY_STRIPS]
    tile, place = np.nonzero(by_strips)
    rank = (np.cumsum(by_strips, axis=1) - 1)[tile, place]
    escapes = packed[:, _BASES + columns.count :].reshape(num_tiles, -1, ESCAPE_BYTES)
    exponents[tile, _BY_STRIPS[place]] = escapes[tile, np.minimum(rank, escapes.shape[1] - 1)]
    halves = np.empty((num_tiles, MANTISSA_BYTES, 2), np.uint8)
    halves[:, :, 0] = packed[:, :MANTISSA_BYTES]
    halves[:, :, 1] = exponents.reshape(num_tiles, -1)
    rotated = halves.reshape(num_tiles, -1).view(np.uint32).reshape(num_tiles, TILE_GROUPS, -1)
    words = rotated >> 1 | rotated << 31
    words += _shift(packed[:, _BASES : _BASES + columns.count], columns)[:, :, None]
    return words.view(np.uint8).reshape(num_tiles, TILE_BYTES)


def read_raw(packed: NDArray[np.uint8], entry: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a raw tile, `(TILE_BYTES,)`, from its place and its entry of the pool."""
    assert entry.shape == (POOL_ENTRY_BYTES,)
    return np.concatenate([packed[:MAIN_BYTES], entry])
