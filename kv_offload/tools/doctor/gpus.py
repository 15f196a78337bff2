"""Checks of GPUs: torch can use them, the configuration suits them, and their copies are fast."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.gate_test import GateReport, check_gates

from kv_offload.config import OffloadConfig
from kv_offload.tools.doctor.copies import Rates, measure
from kv_offload.tools.doctor.installation import Torch
from kv_offload.tools.doctor.report import Check, accepted, judged, not_checked
from kv_offload.worker.allocation import check_packing, transfer_kind

if TYPE_CHECKING:
    import torch

ENOUGH = 0.6
"""Share of a link's bandwidth that copies should reach. An H100 on PCIe 5.0 x16 reaches 0.73 to
0.81 (bench/results/h100/swap.json); guests of a hypervisor reach less."""


def check_gpus(
    installed: Torch | None, config: OffloadConfig, *, measures: bool
) -> Iterator[Check]:
    """Check that torch can use its GPUs and, for each, packing and copies. Takes seconds.

    Without `measures`, torch is not imported and no GPU is used.
    """
    if installed is None:
        yield not_checked("GPU", "torch is not installed in this Python, or damaged")
        return
    if config.transfer_engine != "auto":
        kind = partial(transfer_kind, config, "cpu" if installed.cuda is None else "cuda")
        yield accepted("transfer engine", f"{config.transfer_engine} suits torch", kind)
    if installed.cuda is None or not measures:
        reason = "torch is built without CUDA" if measures else "--no-measure was given"
        yield not_checked("GPU", reason)
        return
    try:
        import torch

        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - torch may raise anything if it cannot be loaded
        remedy = (
            "Look at nvidia-smi and CUDA_VISIBLE_DEVICES. In a container, give --gpus all, and "
            "compute in NVIDIA_DRIVER_CAPABILITIES. If torch lacks a library, look at "
            "LD_LIBRARY_PATH, or install vLLM again."
        )
        needed = f"a GPU and a driver for CUDA {installed.cuda}"
        yield Check("GPU", "problem", _first_line(error), needed, remedy)
        return
    for index in range(torch.cuda.device_count()):
        yield from _check_gpu(torch.device("cuda", index), config)


def _check_gpu(device: torch.device, config: OffloadConfig) -> Iterator[Check]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    yield Check(
        f"GPU {device.index}",
        "ok",
        f"{properties.name}, compute capability {properties.major}.{properties.minor}",
    )
    if config.pack_kv:
        capability = properties.major, properties.minor
        yield accepted(f"packing on {device}", "possible", partial(check_packing, capability))
    name = f"copy rate of {device}"
    try:
        rates = measure(device, packs=config.pack_kv)
        link = read_link(CudaRegistrar(device).pci_bus_id)  # at once: an idle link is slower
    except Exception as error:  # noqa: BLE001 - out of memory, no CuPy, a driver's error
        yield not_checked(name, _first_line(error))
        return
    yield judge_rates(name, rates, link)
    if not config.pack_kv:
        yield judge_gates(f"copy engine of {device}", check_gates(device))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def read_link(pci_bus_id: str, sysfs: Path = Path("/sys")) -> tuple[float, int] | None:
    """Return a PCIe link's current GT/s per lane and its lanes; None if the system hides them."""
    folder = sysfs / "bus/pci/devices" / pci_bus_id.lower()
    try:
        speed = float((folder / "current_link_speed").read_text().split()[0])
        lanes = int((folder / "current_link_width").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return (speed, lanes) if speed and lanes else None


def judge_rates(name: str, rates: Rates, link: tuple[float, int] | None) -> Check:
    """Compare measured rates with the bandwidth of the GPU's link."""
    store, load = rates.store / 1e9, rates.load / 1e9
    found = f"{store:.1f} GB/s to host memory, {load:.1f} GB/s back, by {rates.path}"
    if link is None:
        return Check(name, "ok", f"{found}; the system does not report the link")
    speed, lanes = link
    enough = ENOUGH * speed / 8 * lanes
    return judged(
        name,
        f"{found}, over {lanes} lanes of {speed:g} GT/s",
        f"{enough:.0f} GB/s each way, {ENOUGH:.0%} of the link",
        "Run doctor again while no engine copies. Then see that this process may use memory of the "
        "NUMA node next to the GPU: numactl --membind, or the cpuset of its container.",
        fits=min(store, load) >= enough,
        otherwise="warning",
    )


def judge_gates(name: str, report: GateReport) -> Check:
    """Judge whether small copies are served between the pieces of long ones."""
    needed = "small copies that are served between two pieces of a long one"
    remedy = (
        "Kernels copy instead. Unset CUDA_DEVICE_MAX_CONNECTIONS if it is 1, and look for a newer "
        "driver."
    )
    return judged(name, report.found, needed, remedy, fits=report.yields, otherwise="warning")
