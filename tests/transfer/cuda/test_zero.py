from __future__ import annotations

import numpy as np
import pytest
from kv_swap.cuda import swap, zero
from kv_swap.layout import KVLayout, Region, TensorDescription


def test_runs_cover_every_byte_of_a_block_once() -> None:
    regions = (Region(1 << 20, 100_000, 131_072, 0), Region(1 << 24, 16, 48, 100_000))
    runs = zero.cut_runs(KVLayout(8, regions)).astype(np.int64)
    assert (runs[:, 2] <= 32 << 10).all()
    covered = np.concatenate([np.arange(a, a + n) for a, _, n, _ in runs])
    expected = [np.arange(r.address, r.address + r.page_bytes) for r in regions]
    np.testing.assert_array_equal(covered, np.concatenate(expected))
    assert runs[:, 1].tolist() == [131_072] * 4 + [48]


def test_tensors_that_share_their_bytes_are_zeroed_once() -> None:
    """Two cache groups over one allocation, one with kernel blocks half as large."""
    tensors = [
        TensorDescription("a", 1 << 20, (4, 4096), (4096, 1), 1, 0, 4096),
        TensorDescription("b", 1 << 20, (8, 2048), (2048, 1), 1, 0, 4096),
    ]
    runs = zero.cut_runs(KVLayout.from_tensors(4, tensors))
    assert runs.tolist() == [[1 << 20, 4096, 4096, 0]]


@pytest.mark.parametrize("count", [0, 1, zero.MAX_BLOCKS])
def test_list_is_a_header_and_ids(count: int) -> None:
    target = np.full(zero.LIST_BYTES, 0xFF, np.uint8)
    zero.write_list(target, range(count))
    words = target.view(np.int32)
    assert words[0] == count
    np.testing.assert_array_equal(words[4 : 4 + count], np.arange(count))


@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])
def test_kernel_compiles(architecture: int) -> None:
    pytest.importorskip("cupy", reason="CuPy, whose NVRTC compiles the kernel, is absent")
    from cupy.cuda import nvrtc

    try:
        supported = nvrtc.getSupportedArchs()
    except (RuntimeError, ImportError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    if architecture not in supported:
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not know sm_{architecture}")
    source = (swap.source_directory() / zero.SOURCE).read_text()
    program = nvrtc.createProgram(source, zero.SOURCE, (), ())
    try:
        nvrtc.compileProgram(program, (*zero.COMPILE_OPTIONS, f"-arch=sm_{architecture}"))
        assert nvrtc.getProgramLog(program).strip("\0\n ") == ""
        assert b"zero_pages" in nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
