from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from kv_swap.cuda.gate_test import GateReport

from kv_offload.tools.doctor import copies
from kv_offload.tools.doctor.copies import Rates, measure
from kv_offload.tools.doctor.devices import (
    check_asked_for,
    check_links,
    check_nodes,
    check_packing,
    check_rates,
    judge_gates,
    judge_rates,
    may_have_gpu,
)
from kv_offload.tools.doctor.installation import Torch
from kv_offload.tools.doctor.nvml import Gpu, Machine, read_machine


def gpu(**more: Any) -> Gpu:
    link = {"generation": 5, "max_generation": 5, "width": 16, "max_width": 16}
    known = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "pci_bus_id": "0000:1a:00.0"}
    return Gpu(**(known | link | more))


# -- NVML --------------------------------------------------------------------------------------


class PlayedNVML(ModuleType):
    """NVML of a machine with one GPU, which does not tell its link to a guest."""

    NVMLError = RuntimeError
    told: ClassVar = {
        **dict.fromkeys(("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex")),
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetPciInfo": SimpleNamespace(domain=0, bus=0x1A, device=0),
        "nvmlSystemGetDriverVersion": "580.159.04",
        "nvmlSystemGetCudaDriverVersion_v2": 13010,
    }

    def __getattr__(self, name: str) -> Any:
        def call(*_arguments: Any) -> Any:
            if name not in self.told:
                raise self.NVMLError("Not Supported")
            return self.told[name]

        return call


def test_what_nvml_does_not_tell_is_none(monkeypatch):
    """The real library is asked in tests/gpu/test_doctor.py."""
    monkeypatch.setitem(sys.modules, "pynvml", PlayedNVML("pynvml"))
    unknown = {"generation": None, "max_generation": None, "width": None, "max_width": None}
    assert read_machine() == Machine(driver="580.159.04", cuda=(13, 1), gpus=(gpu(**unknown),))
    monkeypatch.delitem(PlayedNVML.told, "nvmlDeviceGetName")
    machine = read_machine()
    assert machine.problem == "NVML gave an error: Not Supported"
    assert machine.may_have_others


# -- links -------------------------------------------------------------------------------------


ONE_GPU = Machine(gpus=(gpu(),))
NO_DRIVER = Machine(problem="no NVIDIA driver answers")
NOBODY_ASKED = Machine(problem="not installed", may_have_others=True)


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"generation": 1}, "ok"),
        ({"width": 8}, "warning"),
        ({"max_generation": None}, "not checked"),
    ],
)
def test_a_narrow_link_is_a_warning(more, state):
    (check,) = check_links(Machine(gpus=(gpu(**more),)))
    assert (check.name, check.state) == ("GPU 0", state)


# -- what the configuration asks for -------------------------------------------------------------

CUDA_TORCH, CPU_TORCH = Torch("2.11.0", "13.0"), Torch("2.11.0+cpu", None)


@pytest.mark.parametrize(
    ("machine", "torch", "may_have_one", "state"),
    [
        (ONE_GPU, CUDA_TORCH, True, "ok"),
        (ONE_GPU, CPU_TORCH, True, "problem"),
        (NO_DRIVER, CUDA_TORCH, False, "problem"),
        (NOBODY_ASKED, CUDA_TORCH, True, "not checked"),
        (NOBODY_ASKED, None, False, "not checked"),
        (NOBODY_ASKED, CPU_TORCH, False, "problem"),
    ],
)
def test_a_transfer_engine_without_its_gpu_is_a_problem(machine, torch, may_have_one, state):
    """Where nobody could ask for GPUs, there may be one all the same."""
    assert may_have_gpu(machine, torch) is may_have_one
    (check,) = check_asked_for(machine, torch, "cuda")
    assert (check.name, check.state) == ("transfer engine", state)
    assert "asks for cuda" in check.found
    assert bool(check.remedy) == (state == "problem")


# -- rates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "load", "of", "state"),
    [
        (50e9, 49e9, gpu(), "ok"),
        (50e9, 20e9, gpu(), "warning"),
        (50e9, 20e9, gpu(max_generation=4, max_width=8), "ok"),
        (50e9, 49e9, None, "not checked"),
        (50e9, 49e9, gpu(max_generation=9), "not checked"),
    ],
)
def test_rates_against_the_link(store, load, of, state):
    check = judge_rates("copy rate", Rates(store, load, "the kernels"), of)
    assert check.state == state
    assert f"{store / 1e9:.1f} GB/s to host memory, {load / 1e9:.1f} GB/s back" in check.found


@pytest.mark.parametrize("yields", [True, False])
def test_a_copy_engine_that_does_not_yield_is_a_warning(yields):
    check = judge_gates("copy engine of cuda:0", GateReport(yields, "3 small loads took 9 pieces"))
    assert check.state == ("ok" if yields else "warning")
    assert check.found == "3 small loads took 9 pieces"
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in check.remedy) is not yields


def test_a_gpu_that_torch_does_not_see_is_a_problem(monkeypatch):
    """As with an empty `CUDA_VISIBLE_DEVICES`: NVML sees the GPU all the same."""
    torch = pytest.importorskip("torch", reason="needs torch, which is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def check(machine: Machine, installed: Torch) -> tuple[str, str]:
        (line,) = check_rates(machine, installed, "auto")
        assert ("CUDA_VISIBLE_DEVICES" in line.remedy) == bool(machine.gpus)
        return line.state, line.found

    two = Machine(gpus=(gpu(), gpu(index=1)))
    assert check(Machine(), CUDA_TORCH) == ("not checked", "torch sees no GPU")
    assert check(Machine(), CPU_TORCH) == ("not checked", "torch is built without CUDA")
    assert check(two, CUDA_TORCH) == ("problem", "torch sees none of 2 GPUs")
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    state, found = check(Machine(), CUDA_TORCH)
    assert (state, found[:24]) == ("problem", "torch cannot be imported")


@pytest.mark.parametrize("packs", [False, True])
def test_the_host_copies_both_ways(packs, monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch, which is not installed")
    monkeypatch.setattr(copies, "BLOCKS", 4)
    rates = measure(torch.device("cpu"), "auto", packs=packs)
    assert min(rates.store, rates.load) > 0


def test_what_packing_brings_and_which_gpus_do_it():
    old, new, small = check_packing([(8, 9), (9, 0), (12, 0)])
    assert (old.state, new.state, small.state) == ("problem", "ok", "problem")
    assert (old.name, new.name) == ("packing on cuda:0", "packing on cuda:1")
    assert "pack_kv: false" in old.remedy
    slots, times = re.search(  # type: ignore[union-attr]
        r"compute capability 9\.0; pack_kv brings (\d+) blocks of 2 MiB in 1 GiB instead of 512, "
        r"(1\.\d\d) times as many",
        new.found,
    ).groups()
    assert int(slots) / 512 == pytest.approx(float(times), abs=0.01)
    assert 1.25 < float(times) < 1.33


# -- nodes -------------------------------------------------------------------------------------


ONLINE, NUMA_NODE = "devices/system/node/online", "bus/pci/devices/0000:1a:00.0/numa_node"
STATUS, ALLOWED = "self/status", "Name:\tpython\nMems_allowed_list:\t{}\n"
TOLD = "GPU 0 is at node 1, this process may use {}"


@pytest.mark.parametrize(
    ("name", "content", "machine", "state", "found"),
    [
        (STATUS, ALLOWED.format("0"), ONE_GPU, "warning", TOLD.format("0")),
        (STATUS, ALLOWED.format("0-1"), ONE_GPU, "ok", TOLD.format("0-1")),
        (ONLINE, "0\n", ONE_GPU, "ok", "this machine has one"),
        (ONLINE, None, ONE_GPU, "not checked", "cannot be read"),
        (NUMA_NODE, None, ONE_GPU, "not checked", "the system does not report that of GPU 0"),
        (ONLINE, "0-1\n", Machine(), "not checked", "this process may use 0 of 0-1; no GPU"),
    ],
)
def test_a_gpu_at_a_node_that_this_process_may_not_use(
    tmp_path, name, content, machine, state, found
):
    """Of two nodes the GPU is at 1, and the process may use 0 only, where `content` is no other."""
    files: dict[str, str | None] = {ONLINE: "0-1\n", NUMA_NODE: "1\n", STATUS: ALLOWED.format("0")}
    for file, text in (files | {name: content}).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / file).write_text(text)
    (check,) = check_nodes(machine, tmp_path, tmp_path)
    assert check.state == state
    assert check.found.startswith(found)
