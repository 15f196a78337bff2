"""The path of the copy engine: how jobs are cut into copies. `test_engine.py` shows the bytes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from kv_swap.cuda.dma import SLICE_BYTES, SLICE_COPIES, Copier, DmaPath, cut_copies  # noqa: E402
from kv_swap.engine import Direction  # noqa: E402
from kv_swap.layout import KVLayout, Region  # noqa: E402

from tests.support.played_cuda import PlayedCuda, Stream  # noqa: E402

MIB = 1 << 20
ARENA, CACHE = 1 << 40, 1 << 50


def arena_of(layout: KVLayout, piece_bytes: int) -> Any:
    return SimpleNamespace(
        address=ARENA, slot_bytes=layout.slot_bytes, piece_bytes=piece_bytes, registered=True
    )


@pytest.mark.parametrize("piece_bytes", [16, 48, 80, 4096])
@pytest.mark.parametrize("direction", list(Direction))
def test_copies_bring_every_byte_and_end_where_a_registration_does(
    direction: Direction, piece_bytes: int
) -> None:
    layout = KVLayout(9, (Region(CACHE, 64, 64, 0), Region(CACHE + 8192, 48, 80, 64)))
    expected = {
        ARENA + slot * 112 + region.slot_offset_bytes + byte: region.address
        + block * region.block_stride_bytes
        + byte
        for block, slot in ((8, 0), (2, 5))
        for region in layout.regions
        for byte in range(region.page_bytes)
    }
    found = {}
    pairs = np.array([(8, 0), (2, 5)], np.int32)
    for copy in cut_copies(layout, arena_of(layout, piece_bytes), direction, pairs):
        *places, nbytes = copy
        host, device = places if direction is Direction.STORE else places[::-1]
        assert (host - ARENA) // piece_bytes == (host - ARENA + nbytes - 1) // piece_bytes
        found.update({host + byte: device + byte for byte in range(nbytes)})
    assert found == expected


@pytest.mark.parametrize(
    ("page_bytes", "first", "copies"),
    [(16, 64, 100), (MIB, 64, 100), (2 * MIB, 32, 100), (9 * MIB, 7, 100), (1 << 30, 1, 1600)],
)
def test_slices_are_bounded_in_copies_and_bytes(
    cuda: PlayedCuda, page_bytes: int, first: int, copies: int
) -> None:
    layout = KVLayout(1 << 20, (Region(CACHE, page_bytes, page_bytes, 0),))
    path = DmaPath(Direction.STORE, layout, arena_of(layout, 1 << 30), torch.device("cuda", 0))
    pairs = np.stack([np.arange(100)] * 2, 1).astype(np.int32)
    slices = [part for _, part in path.slices(pairs, in_waves=False)]
    assert len(slices[0]) == first
    assert all(0 < len(part) <= SLICE_COPIES for part in slices)
    assert all(sum(nbytes for *_, nbytes in part) <= SLICE_BYTES for part in slices)
    assert sum(map(len, slices)) == copies


def test_copies_are_queued_on_their_device_and_a_failure_names_its_bytes(cuda: PlayedCuda) -> None:
    stream: Any = Stream(cuda)
    copier = Copier(torch.device("cuda", 1))
    copier.copy([(1, 2, 16)] * 2, stream)
    assert Counter(cuda.calls) == {("memcpyAsync", 1): 2}
    cuda.failing = {"memcpyAsync"}
    with pytest.raises(RuntimeError, match=r"injected fault \(one copy of 48 bytes\)"):
        copier.copy([(1, 2, 48)], stream)
