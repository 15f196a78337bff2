"""KV for tests of packing, both like a model's and hostile, and layouts that pack it."""

from __future__ import annotations

import numpy as np
from kv_swap.layout import KVLayout, Packing
from kv_swap.packing.format import TILE_BYTES
from numpy.typing import NDArray

from tests.support.kv_memory import Storage

TILE_VALUES = TILE_BYTES // 2


def normal_tiles(count: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.uint8]:
    """Return normally distributed bf16 values, uint8 `(count, TILE_BYTES)`: almost none escapes."""
    values = np.random.default_rng(seed).normal(0, scale, (count, TILE_VALUES)).astype(np.float32)
    return to_bf16(values)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Truncate float32 `(n, m)` to bf16, as uint8 `(n, 2 * m)`."""
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


def random_tiles(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return random bits: nearly every group escapes."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, TILE_BYTES), np.uint8)


def tiles_with_escapes(counts: list[int], seed: int = 0) -> NDArray[np.uint8]:
    """Return tiles with exactly this many escaping groups, in random places, for any columns."""
    rng = np.random.default_rng(seed)
    words = np.full((len(counts), TILE_VALUES), 0x3F80, np.uint16)
    words ^= rng.integers(0, 128, words.shape, np.uint16)
    words ^= rng.integers(0, 2, words.shape, np.uint16) << 15
    for tile, count in enumerate(counts):
        groups = rng.choice(TILE_VALUES // 8, count, replace=False)
        words[tile, groups * 8 + rng.integers(0, 8, count)] = 0x0081
    return words.view(np.uint8)


def tiles_with_zeros(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return tiles like a model's: rows of 128 channels, some always zero or nearly zero.

    A few strips have no zeros, and a few tiles have a single zero value.
    """
    rng = np.random.default_rng(seed)
    words = normal_tiles(count, seed).view(np.uint16).reshape(count, -1, 128)
    small = rng.choice(np.array([0, 0x8000, 1, 0x807F], np.uint16), (count, 1, 128))
    for tile in range(count):
        chosen = rng.random(128) < rng.choice([0.0, 0.06, 0.9])
        words[tile][:, chosen] = small[tile][:, chosen]
        if tile % 3 == 0:
            words[tile, rng.integers(0, 64), rng.integers(0, 128)] = 0
    return words.view(np.uint8).reshape(count, TILE_BYTES)


def tiles_of_codes(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return groups of few neighbouring codes, zeros, and escapes just below the base."""
    rng = np.random.default_rng(seed)
    top = rng.choice([0, 1, 2, 15, 16, 17, 18, 30, 127, 128, 254, 255], (count, 1, 1))
    # Exponents in a group, relative to the largest.
    choices = np.array([[0, 15, 16, 14], [15, 15, 15, 15], [14, 14, 14, 15], [14] * 4, [0] * 4])
    kind = rng.choice(len(choices), (count, 1024, 1), p=[0.01, 0.2, 0.02, 0.002, 0.768])
    exponents = top - choices[kind, rng.integers(0, 4, (count, 1024, 8))]
    zero = rng.choice([0.0, 0.01, 0.99], (count, 1, 1), p=[0.4, 0.4, 0.2])
    exponents[rng.random((count, 1024, 8)) < zero] = 0
    words = np.maximum(exponents, 0).astype(np.uint16) << 7
    words |= rng.integers(0, 1 << 16, words.shape, np.uint16) & 0x807F
    return words.view(np.uint8).reshape(count, TILE_BYTES)


def hostile_tiles() -> NDArray[np.uint8]:
    """Return tiles of each extreme kind of value, and of mixed kinds."""
    special = [0, 0x8000, 0x7FFF, 0xFFFF, 0x7F80, 0xFF80, 1, 0x8001, 0x007F, 0x3F80, 0x0780, 0x0700]
    rng = np.random.default_rng(7)
    words = np.empty((len(special) + 2, TILE_VALUES), np.uint16)
    words[: len(special)] = np.array(special, np.uint16)[:, None]
    words[-2] = rng.choice(np.array(special, np.uint16), TILE_VALUES)
    words[-1] = np.where(rng.random(TILE_VALUES) < 0.999, 0x3F80, 0x7FC1)
    return words.view(np.uint8)


def packed_cache(
    num_blocks: int,
    page_bytes: list[int],
    packings: list[Packing | None],
    *,
    padding_bytes: int = 0,
) -> tuple[KVLayout, Storage]:
    """Return one layer per page size, packed where a packing is given, with padding in between."""
    sizes = [num_blocks * page + padding_bytes for page in page_bytes]
    storage = Storage(sum(sizes))
    tensors = []
    for layer, page in enumerate(page_bytes):
        shape, strides = (num_blocks, page), (page, 1)
        offset = sum(sizes[:layer])
        tensors.append(storage.describe(str(layer), num_blocks, shape, strides, offset=offset))
    wanted = {str(i): packing for i, packing in enumerate(packings) if packing is not None}
    return KVLayout.from_tensors(num_blocks, tensors).packed(wanted), storage


class PackedCache:
    """A packed layout whose blocks all differ and fit; layers are apart."""

    def __init__(
        self, num_blocks: int, page_bytes: list[int], packings: list[Packing | None]
    ) -> None:
        layout, self.storage = packed_cache(num_blocks, page_bytes, packings, padding_bytes=64)
        self.layout, data = layout, self.storage.data
        data[:] = normal_tiles(-(-len(data) // TILE_BYTES)).reshape(-1)[: len(data)]
        self.written = data.copy()

    def pages(self, memory: NDArray[np.uint8] | None = None) -> list[NDArray[np.uint8]]:
        """Return views `(num_blocks, page_bytes)` of all regions, in `memory` or the storage."""
        memory = self.storage.data if memory is None else memory
        found = []
        for region in self.layout.regions:
            first = region.address - self.storage.address
            whole = memory[first : first + self.layout.num_blocks * region.page_bytes]
            found.append(whole.reshape(self.layout.num_blocks, region.page_bytes))
        return found

    def spoil(self, block: int, num_tiles: int = 2) -> None:
        """Make tiles of a block random. The pool holds one, so more do not fit."""
        assert self.layout.pool_entries == 1
        tiles = random_tiles(num_tiles, block).reshape(-1)
        self.pages()[2][block][: num_tiles * TILE_BYTES] = tiles
        self.written = self.storage.data.copy()

    def check(self, moved: list[tuple[int, int]]) -> None:
        """Check that each (block, whose) block has the other's bytes, and all else its own."""
        expected = self.written.copy()
        for page, was in zip(self.pages(expected), self.pages(self.written), strict=True):
            for block, whose in moved:
                page[block] = was[whose]
        np.testing.assert_array_equal(self.storage.data, expected)
