from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from transfer import swap
from transfer.layout import KVLayout, Region


@pytest.fixture
def layout() -> KVLayout:
    pages = [(1 << 20, 10_000, 16_384), (1 << 24, 16, 48), (1 << 25, 8192, 8192)]
    regions, offset = [], 0
    for address, page_bytes, stride in pages:
        page_bytes -= page_bytes % 16
        regions.append(Region(address, page_bytes, stride, offset))
        offset += page_bytes
    return KVLayout(64, tuple(regions))


def test_chunks_cover_every_byte_of_a_slot_once(layout: KVLayout) -> None:
    chunks = swap._chunks(layout).astype(np.int64)
    assert (chunks[:, 3] * 16 <= 4096).all()
    slot = np.concatenate([np.arange(o, o + 16 * n) for _, _, o, n in chunks])
    np.testing.assert_array_equal(slot, np.arange(layout.slot_bytes))
    page = np.concatenate([np.arange(a, a + 16 * n) for a, _, _, n in chunks])
    expected = [np.arange(r.address, r.address + r.page_bytes) for r in layout.regions]
    np.testing.assert_array_equal(page, np.concatenate(expected))
    strides = np.repeat(chunks[:, 1], chunks[:, 3])
    expected = [np.full(r.page_bytes // 16, r.block_stride_bytes) for r in layout.regions]
    np.testing.assert_array_equal(strides, np.concatenate(expected))


@pytest.mark.parametrize("count", [0, 1, swap.MAX_PAIRS])
def test_list_is_a_header_and_pairs(count: int) -> None:
    target = np.full(swap.LIST_BYTES, 0xFF, np.uint8)
    pairs = np.arange(2 * count, dtype=np.int32).reshape(-1, 2)
    swap.write_list(target, pairs)
    words = target.view(np.int32)
    assert words[0] == count
    np.testing.assert_array_equal(words[4 : 4 + 2 * count], pairs.reshape(-1))


def test_source_is_found_in_a_checkout_and_once_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "swap_store" in swap.source_path().read_text()
    installed = tmp_path / "transfer" / "csrc" / "swap.cu"
    installed.parent.mkdir(parents=True)
    installed.touch()
    monkeypatch.setattr(swap, "__file__", str(tmp_path / "transfer" / "swap.py"))
    assert swap.source_path() == installed
    installed.unlink()
    assert swap.source_path() == tmp_path / "csrc" / "swap.cu"


@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])
def test_kernels_compile(architecture: int) -> None:
    """NVRTC needs no device: what a user's GPU compiles is compiled here for each generation."""
    pytest.importorskip("cupy", reason="CuPy, whose NVRTC compiles the kernels, is absent")
    from cupy.cuda import nvrtc

    try:
        supported = nvrtc.getSupportedArchs()
    except (RuntimeError, ImportError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    if architecture not in supported:
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not know sm_{architecture}")
    program = nvrtc.createProgram(swap.source_path().read_text(), "swap.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*swap.COMPILE_OPTIONS, f"-arch=sm_{architecture}"))
        assert nvrtc.getProgramLog(program).strip("\0\n ") == ""
        cubin = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    assert b"swap_store" in cubin
    assert b"swap_load" in cubin
