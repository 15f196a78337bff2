"""Packs whole slots on the host: places their tiles, and assigns pool entries to raw tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_swap.layout import KVLayout
from kv_swap.packing.format import (
    GROUP_VALUES,
    KIND_RAW,
    PACKED_TILE_BYTES,
    POOL_ENTRY_BYTES,
    TILE_BYTES,
    TileColumns,
    tile_columns,
)
from kv_swap.packing.tiles import make_raw, pack_tiles, read_headers, read_raw, unpack_tiles

Pages = Mapping[int, NDArray[np.uint8]]
"""The pages of n blocks by region index, each of shape `(n, page_bytes)`."""


@dataclass(frozen=True, slots=True)
class PlacedTile:
    """A tile of a region: its offset in the page, and that of the packed tile in a slot."""

    region: int
    page_offset_bytes: int
    slot_offset_bytes: int
    columns: TileColumns


def place_tiles(layout: KVLayout, regions: Iterable[int]) -> Iterator[PlacedTile]:
    """Yield the tiles of a layout's regions with these indices; raw regions have none."""
    for index in regions:
        region = layout.regions[index]
        for tile in range(region.num_tiles):
            assert region.packing is not None, "a region without packing has no tiles"
            first_group = tile * TILE_BYTES // (2 * GROUP_VALUES)
            yield PlacedTile(
                index,
                tile * TILE_BYTES,
                region.slot_offset_bytes + tile * PACKED_TILE_BYTES,
                tile_columns(region.packing, first_group),
            )


class SlotPacker:
    """Packs and unpacks blocks of a packed layout between pages and slots in NumPy arrays."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    def pack(self, pages: Pages, slots: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Pack `pages` of all regions into `slots`, zeros of shape `(n, slot_bytes)`.

        Returns a mask, of shape `(n,)`, of the blocks that do not fit; their slots hold garbage.
        """
        for page, slot in self._raw_parts(pages, slots):
            slot[:] = page
        tiles = list(place_tiles(self.layout, range(len(self.layout.regions))))
        fits = np.empty((len(slots), len(tiles)), np.bool_)
        for columns, indices in _by_columns(tiles):
            of_pages = np.stack([_in_page(pages, tiles[i]) for i in indices], axis=1)
            packed, fitting = pack_tiles(of_pages.reshape(-1, TILE_BYTES), columns)
            fits[:, indices] = fitting.reshape(len(slots), -1)
            by_slot = packed.reshape(len(slots), -1, PACKED_TILE_BYTES)
            for place, index in enumerate(indices):
                _in_slot(slots, tiles[index])[:] = by_slot[:, place]
        pool = self._pool(slots)
        used = np.zeros(len(slots), np.int64)
        for row, index in np.argwhere(~fits).tolist():
            entry = int(used[row])
            used[row] += 1
            if entry < pool.shape[1]:
                page = _in_page(pages, tiles[index])[row]
                make_raw(page, _in_slot(slots, tiles[index])[row], pool[row, entry], entry)
        refused: NDArray[np.bool_] = used > pool.shape[1]
        return refused

    def unpack(self, slots: NDArray[np.uint8], pages: Pages) -> None:
        """Unpack `slots`, of shape `(n, slot_bytes)`, into `pages` of some regions.

        Raises `ValueError` for a slot without packed tiles.
        """
        for page, slot in self._raw_parts(pages, slots):
            page[:] = slot
        tiles = list(place_tiles(self.layout, pages))
        pool = self._pool(slots)
        for columns, indices in _by_columns(tiles):
            packed = np.stack([_in_slot(slots, tiles[i]) for i in indices], axis=1)
            headers = read_headers(packed.reshape(-1, PACKED_TILE_BYTES))
            unpacked = unpack_tiles(packed.reshape(-1, PACKED_TILE_BYTES), columns)
            for number in np.flatnonzero(headers["kind"] == KIND_RAW).tolist():
                row, place = divmod(number, len(indices))
                entry = int(headers["zeros_or_entry"][number])
                if entry >= pool.shape[1]:
                    raise ValueError(
                        f"a raw tile names entry {entry} of a pool of {pool.shape[1]} entries"
                    )
                unpacked[number] = read_raw(packed[row, place], pool[row, entry])
            by_slot = unpacked.reshape(len(slots), -1, TILE_BYTES)
            for place, index in enumerate(indices):
                _in_page(pages, tiles[index])[:] = by_slot[:, place]

    def _raw_parts(
        self, pages: Pages, slots: NDArray[np.uint8]
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield the raw parts, each as a view of the pages and one of the slots."""
        for index, page in pages.items():
            raw = self.layout.regions[index].raw_part
            if raw is not None:
                first = raw.slot_offset_bytes
                yield page[:, -raw.page_bytes :], slots[:, first : first + raw.page_bytes]

    def _pool(self, slots: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the pools as a view of shape `(n, entries, POOL_ENTRY_BYTES)`."""
        pools = slots[:, self.layout.pool_offset_bytes :]
        return pools.reshape(len(slots), self.layout.pool_entries, POOL_ENTRY_BYTES)


def _by_columns(tiles: list[PlacedTile]) -> Iterator[tuple[TileColumns, list[int]]]:
    """Group tiles by columns; yield the columns and the indices of their tiles."""
    found: dict[int, list[int]] = {}
    for index, tile in enumerate(tiles):
        found.setdefault(id(tile.columns), []).append(index)
    for indices in found.values():
        yield tiles[indices[0]].columns, indices


def _in_page(pages: Pages, tile: PlacedTile) -> NDArray[np.uint8]:
    first = tile.page_offset_bytes
    return pages[tile.region][:, first : first + TILE_BYTES]


def _in_slot(slots: NDArray[np.uint8], tile: PlacedTile) -> NDArray[np.uint8]:
    first = tile.slot_offset_bytes
    return slots[:, first : first + PACKED_TILE_BYTES]
