"""What the kernels are given: tables of tiles, slices of jobs, sources and options."""

from __future__ import annotations

import struct
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_swap.cuda import swap
from kv_swap.cuda.kernel_families import FAMILIES, PACKED, VECTOR, LaunchShape
from kv_swap.cuda.swap import MAX_PAIRS, KernelPath
from kv_swap.cuda.tiles import cut_tiles
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region

from tests.support.registrars import Registrar

SHAPES = [family.shapes[direction] for family in FAMILIES for direction in Direction]


def layout_of(page_bytes: list[int]) -> KVLayout:
    offsets = np.cumsum([0, *page_bytes[:-1]]).tolist()
    regions = [
        Region((1 + i) << 24, nbytes, nbytes + 16 * i, offset)
        for i, (nbytes, offset) in enumerate(zip(page_bytes, offsets, strict=True))
    ]
    return KVLayout(4, tuple(regions))


@given(
    data=st.data(),
    shape=st.sampled_from([*SHAPES, LaunchShape(1, 32, 128, 2)]),
    pages=st.lists(
        st.sampled_from([16, 48, 512, 4096, 4112, 16_384, 65_552]), min_size=1, max_size=70
    ),
)
def test_tiles_cover_every_byte_of_their_wave_once_and_fit(data, shape, pages):
    regions = layout_of(pages).regions
    wave_of = data.draw(st.lists(st.integers(0, 3), min_size=len(pages), max_size=len(pages)))
    waves = [[r for r, w in zip(regions, wave_of, strict=True) if w == n] for n in set(wave_of)]
    table, firsts = cut_tiles(waves, shape)
    assert (firsts[0], firsts[-1]) == (0, len(table))
    # What `WaveTable` allocates before it knows the waves.
    assert len(table) <= sum(-(-nbytes // shape.tile_bytes) for nbytes in pages)
    per_tile = 2 + shape.tile_bytes // min(pages)
    assert table.shape[1] <= min(shape.segments_per_tile, len(pages), per_tile)
    words = table.astype(np.int64)
    nbytes, tile_bytes = words[:, :, 3] & 0xFFFFFFFF, words[:, :, 3] >> 32
    assert (tile_bytes == nbytes.sum(axis=1, keepdims=True)).all()
    assert (tile_bytes > 0).all()
    assert (tile_bytes <= shape.tile_bytes).all()
    words[:, :, 3] = nbytes
    for wave, (first, end) in zip(waves, pairwise(firsts), strict=True):
        found = [row for row in words[first:end].reshape(-1, 4).tolist() if row[3]]
        for region in wave:
            copied = 0
            while copied < region.page_bytes:
                address, stride, offset, size = found.pop(0)
                assert address == region.address + copied
                assert stride == region.block_stride_bytes
                assert offset == region.slot_offset_bytes + copied
                copied += size
            assert copied == region.page_bytes
        assert not found


def test_tiles_are_full_where_pages_are_small():
    shape = LaunchShape(1, 32, 16_384, 32)
    table, _ = cut_tiles([layout_of([4096] * 8).regions], shape)
    assert table.shape == (2, 4, 4)


def test_a_tile_ends_where_the_slot_has_a_gap():
    regions = (Region(1 << 20, 4096, 4096, 0), Region(1 << 21, 4096, 4096, 8192))
    tiles, _ = cut_tiles([regions], LaunchShape(1, 32, 16_384, 32))
    assert tiles[:, 0, 2].tolist() == [0, 8192]


# -- how jobs are cut --------------------------------------------------------------------------

MIB = 1 << 20


def make_path(slot_bytes: int) -> KernelPath:
    """A path with four waves of as many bytes each."""
    table: Any = SimpleNamespace(wave_bytes=[slot_bytes // 4] * 4)
    return KernelPath(Direction.LOAD, [], slot_bytes, Registrar(), [table])


def make_pairs(count: int) -> np.ndarray:
    return np.arange(2 * count, dtype=np.int32).reshape(-1, 2)


@pytest.mark.parametrize(
    ("slot_bytes", "pairs"), [(16, MAX_PAIRS), (1 << 30, 1), (128 * MIB, 2), (80 * MIB, 3)]
)
def test_slices_are_bounded_in_pairs_and_bytes(slot_bytes, pairs):
    path = make_path(slot_bytes)
    slices = [part for _, part in path.slices(make_pairs(pairs + 1), in_waves=False)]
    assert [(first, len(part)) for first, part in slices] == [(0, pairs), (pairs, 1)]
    parts = [part for _, part in slices]
    np.testing.assert_array_equal(np.concatenate(parts), make_pairs(pairs + 1))


@pytest.mark.parametrize(("slot_bytes", "counts"), [(MIB, [5]), (256 * MIB, [4, 1])])
def test_a_load_in_waves_is_cut_wave_by_wave(slot_bytes, counts):
    slices = make_path(slot_bytes).slices(make_pairs(5), in_waves=True)
    expected = [(wave, count) for wave in range(4) for count in counts]
    assert [(wave, len(part)) for wave, (_, part) in slices] == expected


# -- sources -----------------------------------------------------------------------------------


def test_sources_are_found_in_a_checkout_and_once_installed(tmp_path, monkeypatch):
    for family in FAMILIES:
        assert "swap_store" in (swap.source_directory() / family.source).read_text()
    installed = tmp_path / "transfer" / "kv_swap" / "csrc"
    installed.mkdir(parents=True)
    module = tmp_path / "transfer" / "kv_swap" / "cuda" / "swap.py"
    monkeypatch.setattr(swap, "__file__", str(module))
    assert swap.source_directory() == installed
    installed.rmdir()
    assert swap.source_directory() == tmp_path / "csrc"


def test_options_change_with_the_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(swap, "source_directory", lambda: tmp_path)
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "swap.cuh"
    options = []
    for text in ("a", "b", "a"):
        header.write_text(text)
        options.append(swap.compile_options(VECTOR))
    assert options[0] == options[2] != options[1]


@pytest.mark.parametrize("family", [*FAMILIES, PACKED], ids=lambda family: family.name)
@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])
def test_kernels_compile(architecture, family):
    """NVRTC needs no device: what a user's GPU compiles is compiled here for each generation."""
    pytest.importorskip("cupy", reason="CuPy, whose NVRTC compiles the kernels, is absent")
    from cupy.cuda import nvrtc

    major, minor = family.min_capability
    if architecture < 10 * major + minor:
        pytest.skip(f"{family.name} needs sm_{major}{minor}")
    try:
        supported = nvrtc.getSupportedArchs()
    except (RuntimeError, ImportError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    if architecture not in supported:
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not know sm_{architecture}")
    code = (swap.source_directory() / family.source).read_text()
    program = nvrtc.createProgram(code, family.source, (), ())
    options = (*swap.compile_options(family), f"-arch=sm_{architecture}")
    try:
        nvrtc.compileProgram(program, options)
        assert nvrtc.getProgramLog(program).strip("\0\n ") == ""
        cubin = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    for direction, shape in family.shapes.items():
        static_bytes = section_bytes(cubin, f".nv.shared.swap_{direction.value}")
        # Which has what CUDA itself takes, and devices do not count.
        assert static_bytes - 1024 + shape.shared_bytes <= family.shared_bytes


def section_bytes(elf: bytes, name: str) -> int:
    """Return the size of a section of a file in the format ELF64."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    row_bytes, num_rows, names = struct.unpack_from("<HHH", elf, 58)
    # Offset of the name, (type, flags, address), offset and size.
    rows = [struct.unpack_from("<I20xQQ", elf, table + i * row_bytes) for i in range(num_rows)]
    first = rows[names][1]
    (found,) = (
        size for offset, _, size in rows if elf[first + offset :].startswith(name.encode() + b"\0")
    )
    return int(found)
