from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap.cuda import registrar
from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.errors import DeviceError, PinnedMemoryError

torch = pytest.importorskip("torch")


class Cuda:
    """CuPy's runtime and the driver's capture mode, as far as a registrar uses them."""

    def __init__(self) -> None:
        self.cudaDevAttrCanUseHostPointerForRegisteredMem = 91
        self.current = 0
        self.mode = 0
        self.calls: list[tuple[Any, ...]] = []
        self.fails = False

    def deviceGetAttribute(self, attribute: int, index: int) -> int:  # noqa: N802
        return 0 if (attribute, index) == (91, 3) else 1

    def deviceGetPCIBusId(self, index: int) -> str:  # noqa: N802
        return f"0000:0{index}:00.0"

    @contextmanager
    def device(self, index: int) -> Any:
        self.current, before = index, self.current
        try:
            yield
        finally:
            self.current = before

    def hostRegister(self, *arguments: int) -> None:  # noqa: N802
        self.calls.append(("register", self.current, self.mode, *arguments))
        if self.fails:
            raise RuntimeError("cudaErrorMemoryAllocation")

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        self.calls.append(("unregister", self.current, self.mode, address))

    def exchange(self, mode: ctypes.c_int) -> None:
        self.mode, mode.value = mode.value, self.mode


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=made, Device=made.device))
    monkeypatch.setattr(registrar, "import_cupy", lambda: fake)
    monkeypatch.setattr(registrar, "_exchange_capture_mode", made.exchange)
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_registered_on_the_device_and_beside_captures(cuda: Cuda, fails: bool) -> None:
    made = CudaRegistrar(torch.device("cuda", 2))
    assert made.pci_bus_id == "0000:02:00.0"
    cuda.fails = fails
    with pytest.raises(RuntimeError, match="cudaError") if fails else nullcontext():
        made.register(4096, 8192)
    made.unregister(4096)
    assert cuda.calls == [("register", 2, 2, 4096, 8192, 3), ("unregister", 2, 2, 4096)]
    assert (cuda.current, cuda.mode) == (0, 0), "the thread is left as it was"


def test_a_driver_that_refuses_the_capture_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 3)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    with pytest.raises(RuntimeError, match="StreamCaptureMode failed with CUresult 3"):
        registrar._exchange_capture_mode(ctypes.c_int(2))


def test_missing_cupy_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    twelve, thirteen = "cupy-cuda12x", "cupy-cuda13x"
    for version, package in (("12.8", twelve), ("13.0", thirteen), (None, thirteen)):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(DeviceError, match=rf"pip install {package}$"):
            CudaRegistrar(torch.device("cuda", 0))


def test_device_that_cannot_use_host_pointers(cuda: Cuda) -> None:
    CudaRegistrar(torch.device("cuda", 0))
    with pytest.raises(PinnedMemoryError, match="device 3 cannot reach"):
        CudaRegistrar(torch.device("cuda", 3))
    with pytest.raises(DeviceError, match="no CUDA device"):
        CudaRegistrar(torch.device("cpu"))
