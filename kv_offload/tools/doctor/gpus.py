"""Checks that torch can use the GPUs, that the configuration suits them, and their copy speed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
"""Share of a link's bandwidth that copies should reach. An H200 on PCIe 5.0 x16 reaches 0.71 to
0.81 (bench/results/h200/swap.json); virtual machines reach less."""


def check_gpus(
    installed: Torch | None, config: OffloadConfig, *, measures: bool
) -> Iterator[Check]:
    """Check that torch can use its GPUs and, for each GPU, packing and copies. Takes seconds.

    Copies nothing without `measures`.
    """
    if installed is None:
        yield not_checked("GPU", "torch is not installed in this Python, or damaged")
        return
    if config.transfer_engine != "auto":
        kind = partial(transfer_kind, config, "cpu" if installed.cuda is None else "cuda")
        yield accepted("transfer engine", f"{config.transfer_engine} suits torch", kind)
    if installed.cuda is None:
        yield not_checked("GPU", "torch is built without CUDA")
        return
    try:
        import torch

        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - if torch cannot be loaded, it may raise anything
        remedy = (
            "Look at nvidia-smi and CUDA_VISIBLE_DEVICES. In a container, give --gpus all, and "
            "compute in NVIDIA_DRIVER_CAPABILITIES. If torch lacks a library, look at "
            "LD_LIBRARY_PATH, or install vLLM again."
        )
        needed = f"a GPU and a driver for CUDA {installed.cuda}"
        yield Check("GPU", "problem", _first_line(error), needed, remedy)
        return
    for index in range(torch.cuda.device_count()):
        yield from _check_gpu(torch.device("cuda", index), config, measures=measures)


def _check_gpu(device: torch.device, config: OffloadConfig, *, measures: bool) -> Iterator[Check]:
    import torch

    try:
        properties = torch.cuda.get_device_properties(device)
    except Exception as error:  # noqa: BLE001 - a sick GPU: whatever its driver says
        yield Check(f"GPU {device.index}", "problem", _first_line(error), "a GPU that works")
        return
    yield Check(
        f"GPU {device.index}",
        "ok",
        f"{properties.name}, compute capability {properties.major}.{properties.minor}",
    )
    if config.pack_kv:
        capability = properties.major, properties.minor
        yield accepted(f"packing on {device}", "possible", partial(check_packing, capability))
    name = f"copy rate of {device}"
    if not measures:
        yield not_checked(name, "--no-measure was given")
        return
    try:
        pci_bus_id = CudaRegistrar(device).pci_bus_id
        rates = measure(device, packs=config.pack_kv)
        link = read_link(pci_bus_id)  # right after the copies: an idle link is slower
    except Exception as error:  # noqa: BLE001 - out of memory, no CuPy, a driver's error
        yield not_checked(name, _first_line(error))
        return
    yield judge_rates(name, rates, link)
    if not config.pack_kv:
        yield judge_gates(f"copy engine of {device}", check_gates(device))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Link(NamedTuple):
    """The PCIe link of a GPU."""

    gigatransfers: float
    """Current rate, per second and lane."""
    lanes: int
    max_lanes: int


def read_link(pci_bus_id: str, sysfs: Path = Path("/sys")) -> Link | None:
    """Return a GPU's link; None if the system hides it."""
    folder = sysfs / "bus/pci/devices" / pci_bus_id.lower()
    try:
        speed = float((folder / "current_link_speed").read_text().split()[0])
        lanes = int((folder / "current_link_width").read_text())
        max_lanes = int((folder / "max_link_width").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return Link(speed, lanes, max_lanes) if speed and lanes else None


def judge_rates(name: str, rates: Rates, link: Link | None) -> Check:
    """Compare measured rates with the bandwidth of the GPU's link."""
    store, load = rates.store / 1e9, rates.load / 1e9
    found = f"{store:.1f} GB/s to host memory, {load:.1f} GB/s back, by {rates.path}"
    if link is None:
        return not_checked(name, f"{found}; the system does not report the link")
    enough = ENOUGH * link.gigatransfers / 8 * link.max_lanes
    return judged(
        name,
        f"{found}, over {link.lanes} of {link.max_lanes} lanes of {link.gigatransfers:g} GT/s",
        f"{enough:.0f} GB/s each way, {ENOUGH:.0%} of the link with all lanes",
        "With fewer lanes than the GPU has, see the slot and its riser. Else run doctor again "
        "while no engine copies, and see that this process may use memory of the NUMA node next to "
        "the GPU: numactl --membind, or the cpuset of its container.",
        fits=min(store, load) >= enough,
        otherwise="warning",
    )


def judge_gates(name: str, report: GateReport) -> Check:
    """Judge whether small copies run between the pieces of long ones."""
    needed = "small copies that are served between two pieces of a long one"
    remedy = (
        "Kernels copy instead. Unset CUDA_DEVICE_MAX_CONNECTIONS if it is 1, and look for a newer "
        "driver."
    )
    return judged(name, report.found, needed, remedy, fits=report.yields, otherwise="warning")
