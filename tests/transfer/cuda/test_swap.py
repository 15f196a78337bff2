from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kv_swap.cuda import swap, swap_bulk, swap_vector
from kv_swap.layout import KVLayout, Region

FAMILIES = [swap_vector.FAMILY, swap_bulk.FAMILY]


@pytest.fixture
def layout() -> KVLayout:
    pages = [(1 << 20, 10_000, 16_384), (1 << 24, 16, 48), (1 << 25, 8192, 8192)]
    regions, offset = [], 0
    for address, page_bytes, stride in pages:
        page_bytes -= page_bytes % 16
        regions.append(Region(address, page_bytes, stride, offset))
        offset += page_bytes
    return KVLayout(64, tuple(regions))


def bytes_of(segments: np.ndarray, column: int) -> np.ndarray:
    """The bytes that segments cover, counted from the address or offset in `column`."""
    nbytes = segments[:, 3] & 0xFFFFFFFF
    return np.concatenate(
        [np.arange(a, a + n) for a, n in zip(segments[:, column], nbytes, strict=True)]
    )


@pytest.mark.parametrize("segments_per_tile", [1, 2, 32])
@pytest.mark.parametrize("tile_bytes", [128, 4096, 16_384])
def test_tiles_cover_every_byte_of_a_slot_once(
    layout: KVLayout, tile_bytes: int, segments_per_tile: int
) -> None:
    shape = swap.LaunchShape(1, 32, tile_bytes, segments_per_tile)
    tiles = swap.cut_tiles(layout, shape).astype(np.int64)
    assert tiles.shape[1] <= segments_per_tile
    nbytes = tiles[:, :, 3] & 0xFFFFFFFF
    assert (tiles[:, :, 3] >> 32 == nbytes.sum(axis=1, keepdims=True)).all()
    assert (nbytes.sum(axis=1) > 0).all()
    assert (nbytes.sum(axis=1) <= tile_bytes).all()
    segments = tiles.reshape(-1, 4)
    segments = segments[segments[:, 3] & 0xFFFFFFFF > 0]
    np.testing.assert_array_equal(bytes_of(segments, 2), np.arange(layout.slot_bytes))
    pages = [np.arange(r.address, r.address + r.page_bytes) for r in layout.regions]
    np.testing.assert_array_equal(bytes_of(segments, 0), np.concatenate(pages))
    strides = np.repeat(segments[:, 1], segments[:, 3] & 0xFFFFFFFF)
    expected = [np.full(r.page_bytes, r.block_stride_bytes) for r in layout.regions]
    np.testing.assert_array_equal(strides, np.concatenate(expected))


def test_tiles_are_full_where_pages_are_small() -> None:
    regions = tuple(Region(1 << 20 + i, 4096, 4096, 4096 * i) for i in range(8))
    tiles = swap.cut_tiles(KVLayout(4, regions), swap.LaunchShape(1, 32, 16_384, 32))
    assert tiles.shape == (2, 4, 4)


def test_a_tile_ends_where_the_slot_has_a_gap() -> None:
    regions = (Region(1 << 20, 4096, 4096, 0), Region(1 << 21, 4096, 4096, 8192))
    tiles = swap.cut_tiles(KVLayout(4, regions), swap.LaunchShape(1, 32, 16_384, 32))
    assert tiles[:, 0, 2].tolist() == [0, 8192]


@pytest.mark.parametrize("count", [0, 1, swap.MAX_PAIRS])
def test_list_is_a_header_and_pairs(count: int) -> None:
    target = np.full(swap.LIST_BYTES, 0xFF, np.uint8)
    pairs = np.arange(2 * count, dtype=np.int32).reshape(-1, 2)
    swap.write_list(target, pairs)
    words = target.view(np.int32)
    assert words[0] == count
    np.testing.assert_array_equal(words[4 : 4 + 2 * count], pairs.reshape(-1))


def test_sources_are_found_in_a_checkout_and_once_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in FAMILIES:
        assert "swap_store" in (swap.source_directory() / family.source).read_text()
    installed = tmp_path / "transfer" / "kv_swap" / "csrc"
    installed.mkdir(parents=True)
    module = tmp_path / "transfer" / "kv_swap" / "cuda" / "swap.py"
    monkeypatch.setattr(swap, "__file__", str(module))
    assert swap.source_directory() == installed
    installed.rmdir()
    assert swap.source_directory() == tmp_path / "csrc"


def test_options_change_with_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "source_directory", lambda: tmp_path)
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "swap.cuh"
    options = []
    for text in ("a", "b", "a"):
        header.write_text(text)
        options.append(swap.compile_options(swap_vector.FAMILY))
    assert options[0] == options[2] != options[1]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])
def test_kernels_compile(architecture: int, family: swap.KernelFamily) -> None:
    """NVRTC needs no device: what a user's GPU compiles is compiled here for each generation."""
    pytest.importorskip("cupy", reason="CuPy, whose NVRTC compiles the kernels, is absent")
    from cupy.cuda import nvrtc

    if family is swap_bulk.FAMILY and architecture < 90:
        pytest.skip("bulk copies came with sm_90")
    try:
        supported = nvrtc.getSupportedArchs()
    except (RuntimeError, ImportError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    if architecture not in supported:
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not know sm_{architecture}")
    source = (swap.source_directory() / family.source).read_text()
    program = nvrtc.createProgram(source, family.source, (), ())
    try:
        nvrtc.compileProgram(program, (*swap.compile_options(family), f"-arch=sm_{architecture}"))
        assert nvrtc.getProgramLog(program).strip("\0\n ") == ""
        cubin = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    assert b"swap_store" in cubin
    assert b"swap_load" in cubin
