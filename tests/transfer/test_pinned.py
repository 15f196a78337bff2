from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from transfer import pinned
from transfer.errors import DeviceError, PinnedMemoryError
from transfer.pinned import CudaRegistrar, HostArena


def is_mapped(address: int) -> bool:
    """Ask the kernel, without touching the memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return libc.msync(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 1) == 0


class Registrar:
    """Records calls; fails from the `failing_call`-th registration on."""

    def __init__(self, failing_call: int | None = None) -> None:
        self.failing_call = failing_call
        self.calls: list[tuple[int, int]] = []
        self.live: dict[int, int] = {}
        self.unmapped_too_early = False

    def register(self, address: int, nbytes: int) -> None:
        if len(self.calls) == self.failing_call:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.calls.append((address, nbytes))
        self.live[address] = nbytes

    def unregister(self, address: int) -> None:
        self.unmapped_too_early |= not is_mapped(address)
        del self.live[address]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pinned, "_REGISTRATION_BYTES", 4 * mmap.PAGESIZE)
    return 4 * mmap.PAGESIZE


def test_arena_is_exact_and_zero() -> None:
    arena = HostArena(7, 48, register=None)
    view = arena.view()
    assert view.shape == (7, 48)
    assert view.dtype == np.uint8
    assert arena.nbytes == 7 * 48
    assert view.ctypes.data == arena.address
    assert view.flags.writeable
    assert not view.any()
    view[3] = 9
    assert (arena.view()[3] == 9).all()


@pytest.mark.parametrize("drop_arena_first", [True, False])
def test_memory_lives_as_long_as_any_view(drop_arena_first: bool) -> None:
    registrar = Registrar()
    arena = HostArena(4, mmap.PAGESIZE, register=registrar)
    owner = weakref.ref(arena._owner)
    address = arena.address
    derived = arena.view()[1:3].view(np.int32).reshape(-1)[::2]
    if drop_arena_first:
        del arena
        gc.collect()
        assert owner() is not None
        assert registrar.live
        derived[:] = 7
        del derived
    else:
        del derived
        gc.collect()
        assert owner() is not None
        del arena
    gc.collect()
    assert owner() is None
    assert not registrar.live
    assert not registrar.unmapped_too_early
    assert not is_mapped(address)


def test_torch_tensors_keep_the_memory() -> None:
    torch = pytest.importorskip("torch")
    arena = HostArena(2, 64, register=None)
    owner = weakref.ref(arena._owner)
    tensor = torch.from_numpy(arena.view())[1]
    del arena
    gc.collect()
    assert owner() is not None
    del tensor
    gc.collect()
    assert owner() is None


def test_registers_every_byte_in_bounded_pieces(small_pieces: int) -> None:
    registrar = Registrar()
    arena = HostArena(9, mmap.PAGESIZE, register=registrar)
    assert registrar.calls == [
        (arena.address, small_pieces),
        (arena.address + small_pieces, small_pieces),
        (arena.address + 2 * small_pieces, mmap.PAGESIZE),
    ]


def test_partial_registration_is_undone(small_pieces: int) -> None:
    registrar = Registrar(failing_call=2)
    with pytest.raises(PinnedMemoryError) as caught:
        HostArena(12, mmap.PAGESIZE, register=registrar)
    message = str(caught.value)
    assert f"page-lock {12 * mmap.PAGESIZE} bytes" in message
    assert f"bytes {2 * small_pieces} to {3 * small_pieces}" in message
    assert "cudaErrorMemoryAllocation" in message
    assert "ulimit -l" in message
    assert "smaller host cache" in message
    assert len(registrar.calls) == 2
    assert not registrar.live
    assert not registrar.unmapped_too_early


@pytest.mark.parametrize("num_slots", [1 << 40, 1 << 60])
def test_memory_that_cannot_be_mapped(num_slots: int) -> None:
    with pytest.raises(PinnedMemoryError, match="cannot map ") as caught:
        HostArena(num_slots, 1 << 20, register=None)
    assert str(num_slots << 20) in str(caught.value)
    assert "ulimit -l" in str(caught.value)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 16), (16, 0), (-1, 16)])
def test_refuses_empty_arenas(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(PinnedMemoryError, match="at least 1 slot"):
        HostArena(num_slots, slot_bytes, register=None)


def test_memory_that_cannot_be_unregistered_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = Registrar()

    def refuse(address: int) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(registrar, "unregister", refuse)
    monkeypatch.setattr(pinned, "_LEAKED", [])
    arena = HostArena(1, mmap.PAGESIZE, register=registrar)
    address = arena.address
    del arena
    gc.collect()
    assert is_mapped(address)
    assert "cannot unregister" in caplog.text


def test_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "cupy", None)
    for version, extra in (("12.8", "cu12"), ("13.0", "cu13"), (None, "cu13")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(DeviceError, match=rf"pip install 'kv-offload\[{extra}\]'"):
            CudaRegistrar(torch.device("cuda", 0))


def test_device_that_cannot_use_host_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    runtime = SimpleNamespace(
        cudaDevAttrCanUseHostPointerForRegisteredMem=91,
        deviceGetAttribute=lambda attribute, index: 0 if (attribute, index) == (91, 3) else 1,
    )
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(pinned, "import_cupy", lambda: fake)
    CudaRegistrar(torch.device("cuda", 0))
    with pytest.raises(PinnedMemoryError, match="device 3 cannot reach"):
        CudaRegistrar(torch.device("cuda", 3))
    with pytest.raises(DeviceError, match="no CUDA device"):
        CudaRegistrar(torch.device("cpu"))
