from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from kv_swap.cuda import device as cuda_device
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.errors import DeviceError, PinnedMemoryError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_registered_on_the_device_and_beside_captures(cuda, fails):
    made = CudaRegistrar(torch.device("cuda", 2))
    assert made.pci_bus_id == "0000:02:00.0"
    cuda.failing = {"hostRegister"} if fails else set()
    with pytest.raises(RuntimeError, match="injected") if fails else nullcontext():
        made.register(4096, 8192)
    made.unregister(4096)
    assert cuda.registrations == [
        ("hostRegister", 2, 2, 4096, 8192, 3),
        ("hostUnregister", 2, 2, 4096),
    ]
    assert (cuda.device, cuda.capture_mode) == (0, 0), "the thread is left as it was"


def test_a_driver_that_refuses_the_capture_mode(monkeypatch):
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 3)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    with pytest.raises(RuntimeError, match="StreamCaptureMode failed with CUresult 3"):
        cuda_device._exchange_capture_mode(ctypes.c_int(2))


def test_missing_cupy_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    twelve, thirteen = "cupy-cuda12x", "cupy-cuda13x"
    for version, package in (("12.8", twelve), ("13.0", thirteen), (None, thirteen)):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(DeviceError, match=rf"pip install {package}$"):
            CudaRegistrar(torch.device("cuda", 0))


def test_cupy_that_cannot_make_its_folder(tmp_path, monkeypatch):
    """CuPy 14 makes it when it is imported: what its import does is here, not CuPy."""
    (tmp_path / "cupy.py").write_text(
        "import os\nos.makedirs(os.environ['CUPY_CACHE_DIR'], exist_ok=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupy.py" / "kernels"))
    with pytest.raises(DeviceError, match=r"cannot be imported: .*; .*set CUPY_CACHE_DIR to a"):
        CudaRegistrar(torch.device("cuda", 0))
    assert "cupy" not in sys.modules


def test_device_that_cannot_use_host_pointers(cuda):
    CudaRegistrar(torch.device("cuda", 0))
    with pytest.raises(PinnedMemoryError, match="device 3 cannot reach"):
        CudaRegistrar(torch.device("cuda", 3))
    with pytest.raises(DeviceError, match="not a CUDA device"):
        CudaRegistrar(torch.device("cpu"))
