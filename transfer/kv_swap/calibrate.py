"""Measures the copy paths of a device, and finds the rule that what was measured makes.

An engine never measures by itself. While it starts, weights cross the same link, so the figures
would be wrong; once it has started, measuring would take the link from its users. It takes what
`kv-offload calibrate` left in the cache, and without that the kernels.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kv_swap.calibration import PAGE_BYTES, PAGES, Calibration, DeviceKey, Point, read_cached
from kv_swap.cuda.copy_path import CopyPath
from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.dma import make_dma_path
from kv_swap.cuda.kernel_path import KernelPath
from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.cuda.streams import CopyStream
from kv_swap.cuda.swap import SwapKernel, runs_kernels
from kv_swap.engine import Direction
from kv_swap.errors import DeviceError
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena
from kv_swap.path_rule import MeasuredRule, OnlyPath, PathRule

if TYPE_CHECKING:
    import torch

_ROUNDS = 7
"""Of each point, after two that are not counted."""

_DRIVER_FILE = Path("/sys/module/nvidia/version")
_PCI_FOLDER = Path("/sys/bus/pci/devices")


def rule_for(device: torch.device) -> PathRule:
    """Return the rule for a device: measured if it is in the cache, else the kernels.

    The copy engine where the device runs no kernel family.
    """
    if not runs_kernels(device):
        return OnlyPath("dma")
    calibration = read_cached(describe(device))
    return OnlyPath("kernel") if calibration is None else MeasuredRule(calibration)


def describe(device: torch.device) -> DeviceKey:
    """Return what the figures of a device depend on; what the system does not tell is `unknown`."""
    import torch

    index = device_index(device)
    runtime = import_cupy().cuda.runtime
    folder = _PCI_FOLDER / runtime.deviceGetPCIBusId(index).lower()
    # The speed in use falls when the device idles, the width in use does not.
    link = f"{_read(folder / 'max_link_speed')} x {_read(folder / 'current_link_width')}"
    driver = f"{_read(_DRIVER_FILE)}, CUDA {runtime.driverGetVersion()}"
    capability: tuple[int, int] = torch.cuda.get_device_capability(index)
    return DeviceKey(torch.cuda.get_device_name(index), capability, driver, link)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return "unknown"


def measure(device: torch.device) -> Calibration:
    """Measure every point: less than 2 s, once the kernels have been compiled on this machine.

    Raises `DeviceError` for a device that runs no kernels, as there is nothing to choose then.
    """
    if not runs_kernels(device):
        raise DeviceError(f"device {device} runs no copy kernels, so only the copy engine is left")
    points: list[Point] = []
    for page_bytes in PAGE_BYTES:
        points.extend(_measure_pages(device, page_bytes))
    return Calibration(describe(device), tuple(points))


def _measure_pages(device: torch.device, page_bytes: int) -> Iterable[Point]:
    """Measure one page size: one region, every other page of it and every other slot, shuffled."""
    import torch

    num_blocks = 2 * max(PAGES)
    memory = torch.empty(num_blocks * page_bytes, dtype=torch.uint8, device=device)
    region = Region(memory.data_ptr(), page_bytes, page_bytes, 0)
    layout = KVLayout(num_blocks, (region,))
    registrar = CudaRegistrar(device)
    arena = HostArena(num_blocks, page_bytes, register=registrar)
    kernel = SwapKernel(layout, arena, device)
    rng = np.random.default_rng(0)
    for direction in Direction:
        stream = CopyStream(device, 2)
        paths: tuple[CopyPath, ...] = (
            KernelPath(direction, kernel, page_bytes, registrar),
            make_dma_path(direction, layout, arena, device),
        )
        for pages in PAGES:
            chosen = [2 * rng.permutation(num_blocks // 2)[:pages] for _ in range(2)]
            pairs = np.stack(chosen, 1).astype(np.int32)
            for path in paths:
                times = [_seconds(path, stream, pairs) for _ in range(_ROUNDS + 2)][2:]
                gbps = pages * page_bytes / statistics.median(times) / 1e9
                yield Point(path.name, direction, page_bytes, pages, gbps)


def _seconds(path: CopyPath, stream: CopyStream, pairs: NDArray[np.int32]) -> float:
    """Return the seconds from when the stream was free until all is copied, queueing included."""
    first = stream.record()
    for part in path.slices(pairs):
        path.queue(part, stream.stream)
    last = stream.record()
    last.synchronize()
    seconds: float = first.elapsed_time(last) / 1000
    stream.recycle(first, last)
    return seconds
