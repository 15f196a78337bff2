"""Checks of GPUs: their PCIe links, copy rates and NUMA nodes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from kv_swap.cuda.gate_test import GateReport, check_gates
from kv_swap.cuda.kernel_families import PACKED, can_pack
from kv_swap.memory.numa import device_node
from kv_swap.packing.format import packed_slot_bytes

from kv_offload.config.sizes import format_size
from kv_offload.tools.doctor import BLOCK_BYTES
from kv_offload.tools.doctor.copies import EngineChoice, Rates, measure
from kv_offload.tools.doctor.installation import Torch
from kv_offload.tools.doctor.nvml import Gpu, Machine
from kv_offload.tools.doctor.report import Check, judged, not_checked

LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s per PCI Express lane and direction, by generation, net of line encoding."""

GIB = 1 << 30

ENOUGH = 0.6
"""Share of a link's bandwidth that copies should reach. An H100 on PCIe 5.0 x16 reaches 0.73 to
0.81 (bench/results/h100/swap.json); guests of a hypervisor reach less."""


def may_have_gpu(machine: Machine, torch: Torch | None) -> bool:
    """Return whether an engine may have a GPU here: NVML sees one, or cannot be queried."""
    for_cuda = torch is not None and torch.cuda is not None
    return bool(machine.gpus) or (machine.may_have_others and for_cuda)


def check_links(machine: Machine) -> Iterator[Check]:
    """Yield a line for each GPU, or one line with the reason if there is none."""
    if not machine.gpus:
        yield not_checked("GPU", machine.problem or "NVML sees no GPU")
    for gpu in machine.gpus:
        name = f"GPU {gpu.index}"
        if None in (gpu.generation, gpu.max_generation, gpu.width, gpu.max_width):
            yield not_checked(name, f"{gpu.name}; NVML does not report its PCIe link")
            continue
        most = f"{gpu.max_generation}.0 x{gpu.max_width}"
        found = f"{gpu.name}, PCIe {gpu.generation}.0 x{gpu.width}, at most {most}"
        needed = f"x{gpu.max_width}; an idle GPU may lower the generation"
        remedy = (
            "Loads and stores are slower by as much. Reseat the card or its riser, or move it to a "
            "slot that is wired with all lanes."
        )
        fits = gpu.width == gpu.max_width
        yield judged(name, found, needed, remedy, fits=fits, otherwise="warning")


def check_asked_for(machine: Machine, torch: Torch | None, kind: EngineChoice) -> Iterator[Check]:
    """Check that `transfer_engine` fits the KV cache's device; yield nothing for `auto`."""
    if kind == "auto":
        return
    name, asked = "transfer engine", f"the configuration asks for {kind}"
    needs = {"cuda": "a GPU, and a torch for CUDA", "host": "vLLM's CPU engine"}
    remedy = "Set transfer_engine: auto."
    if torch is not None and torch.cuda is None:
        found = f"{asked}; torch is built without CUDA"
        yield judged(name, found, needs[kind], remedy, fits=kind == "host")
    elif machine.may_have_others:
        yield not_checked(name, f"{asked}; {machine.problem}")
    else:
        found = f"{asked}; GPUs seen: {len(machine.gpus)}"
        yield judged(name, found, needs[kind], remedy, fits=bool(machine.gpus) == (kind == "cuda"))


def check_packing(capabilities: Iterable[tuple[int, int]]) -> Iterator[Check]:
    """For each GPU's compute capability, yield whether it can pack and what packing gains."""
    slot_bytes = packed_slot_bytes([BLOCK_BYTES], 0)
    blocks, slots = (GIB // nbytes for nbytes in (BLOCK_BYTES, slot_bytes))
    brings = (
        f"{slots} blocks of {format_size(BLOCK_BYTES)} in 1 GiB instead of {blocks}, "
        f"{BLOCK_BYTES / slot_bytes:.2f} times as many"
    )
    needed = f"compute capability {_dotted(PACKED.min_capability)} or newer, but not 12"
    for index, capability in enumerate(capabilities):
        yield judged(
            f"packing on cuda:{index}",
            f"compute capability {_dotted(capability)}; pack_kv brings {brings}",
            needed,
            "Set pack_kv: false, or use another GPU.",
            fits=can_pack(capability),
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def check_rates(
    machine: Machine, installed: Torch | None, kind: EngineChoice, *, packs: bool = False
) -> Iterator[Check]:
    """Copy blocks to and from every GPU that torch sees, and yield a line for each. Takes seconds.

    With `packs` the blocks are packed, and each GPU gets an additional line.
    """
    name = "copy rate"
    if installed is None or installed.cuda is None:
        reason = "built without CUDA" if installed else "not installed in this Python"
        yield not_checked(name, f"torch is {reason}")
        return
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing driver, which another line reports
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:  # noqa: BLE001 - torch may raise anything if it cannot be loaded
        needed = "a torch that can be imported: vLLM imports it, too"
        remedy = "Install vLLM again. If a library is missing, look at LD_LIBRARY_PATH."
        yield Check(name, "problem", f"torch cannot be imported: {error}", needed, remedy)
        return
    if count == 0 and machine.gpus:
        found = f"torch sees none of {len(machine.gpus)} GPUs"
        remedy = (
            "Look at CUDA_VISIBLE_DEVICES and at the driver above. In a container, "
            "NVIDIA_DRIVER_CAPABILITIES must have compute."
        )
        yield Check(name, "problem", found, "a GPU that programs may use", remedy)
    elif count == 0:
        yield not_checked(name, "torch sees no GPU")
    if packs:
        yield from check_packing(map(torch.cuda.get_device_capability, range(count)))
    for index in range(count):
        name = f"copy rate of cuda:{index}"
        try:
            device = torch.device("cuda", index)
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            rates = measure(device, "auto" if kind == "host" else kind, packs=packs)
        except Exception as error:  # noqa: BLE001 - out of memory, no CuPy, a driver's error
            yield not_checked(name, str(error).partition("\n")[0])
            continue
        gpu = next((gpu for gpu in machine.gpus if gpu.uuid == uuid), None)
        yield judge_rates(name, rates, gpu)
        if not packs:
            yield judge_gates(f"copy engine of cuda:{index}", check_gates(device))


def judge_gates(name: str, report: GateReport) -> Check:
    """Judge whether small copies are served between the pieces of long ones."""
    needed = "small copies that are served between two pieces of a long one"
    remedy = (
        "Kernels copy instead. Unset CUDA_DEVICE_MAX_CONNECTIONS if it is 1, and look for a newer "
        "driver."
    )
    return judged(name, report.found, needed, remedy, fits=report.yields, otherwise="warning")


def judge_rates(name: str, rates: Rates, gpu: Gpu | None) -> Check:
    """Compare measured rates with the bandwidth of the GPU's link."""
    store, load = rates.store / 1e9, rates.load / 1e9
    found = f"{store:.1f} GB/s to host memory, {load:.1f} GB/s back, by {rates.path}"
    per_lane = LANE_GBPS.get(gpu.max_generation or 0) if gpu else None
    if gpu is None or per_lane is None or gpu.max_width is None:
        return not_checked(name, f"{found}; NVML does not report what the link carries")
    link = per_lane * gpu.max_width
    needed = f"{ENOUGH * link:.0f} GB/s each way, {ENOUGH:.0%} of the link"
    remedy = (
        "Run doctor again while no engine copies. Then look at the link above, and at the memory "
        "node below: memory of another node is slower."
    )
    fits = min(store, load) >= ENOUGH * link
    return judged(name, found, needed, remedy, fits=fits, otherwise="warning")


def check_nodes(
    machine: Machine, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")
) -> Iterator[Check]:
    """For each GPU, yield whether this process may use memory of the GPU's NUMA node."""
    name = "memory node"
    try:
        online = (sysfs / "devices/system/node/online").read_text().strip()
        lines = (proc / "self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        allowed = status["Mems_allowed_list"].strip()
    except (OSError, KeyError) as error:
        yield not_checked(name, f"cannot be read: {error}")
        return
    if online.isdecimal():
        yield Check(name, "ok", "this machine has one")
        return
    if not machine.gpus:
        yield not_checked(name, f"this process may use {allowed} of {online}; no GPU is seen")
    for gpu in machine.gpus:
        node = device_node(gpu.pci_bus_id, sysfs)
        if node is None:
            yield not_checked(name, f"the system does not report that of GPU {gpu.index}")
            continue
        found = f"GPU {gpu.index} is at node {node}, this process may use {allowed}"
        remedy = (
            f"Give the engine memory of node {node}: numactl --membind, or the cpuset of its "
            "container."
        )
        needed, fits = f"node {node} among them", node in _numbers(allowed)
        yield judged(name, found, needed, remedy, fits=fits, otherwise="warning")


def _numbers(ranges: str) -> set[int]:
    """Parse a list of numbers and ranges, such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
