"""What the CUDA path needs from outside: CuPy, and the number of a device; imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_swap.errors import DeviceError

if TYPE_CHECKING:
    import torch


def import_cupy() -> Any:
    """Return the module `cupy`. Raises `DeviceError`, naming what to install, without it."""
    try:
        import cupy
    except ImportError as error:
        import torch

        major = 12 if str(torch.version.cuda).startswith("12.") else 13
        raise DeviceError(
            f"CuPy, which compiles and launches the copy kernels, cannot be imported: {error}; "
            f"install it with pip install cupy-cuda{major}x"
        ) from error
    return cupy


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device; the current device for one without."""
    import torch

    if device.type != "cuda":
        raise DeviceError(f"device {device} is no CUDA device; use the host engine for it")
    index: int = torch.cuda.current_device() if device.index is None else device.index
    return index
