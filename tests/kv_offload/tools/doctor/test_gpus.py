from __future__ import annotations

import sys

import pytest
from kv_swap.cuda.gate_test import GateReport

from kv_offload.config import trace_config
from kv_offload.config.host_memory import HostMemory
from kv_offload.tools.doctor import copies
from kv_offload.tools.doctor.copies import Rates, measure
from kv_offload.tools.doctor.gpus import Link, check_gpus, judge_gates, judge_rates, read_link
from kv_offload.tools.doctor.installation import Torch
from kv_offload.tools.doctor.report import Check

CUDA_TORCH, CPU_TORCH = Torch("2.11.0", "13.0"), Torch("2.11.0+cpu", None)


def checks(torch: Torch | None, engine: str = "auto", *, measures: bool = True) -> list[Check]:
    keys = {"cpu_bytes": "1MiB", "transfer_engine": engine}
    config = trace_config(keys, {}, host=HostMemory(1 << 30, "here")).config
    return [*check_gpus(torch, config, measures=measures)]


@pytest.mark.parametrize(
    ("engine", "torch", "state"),
    [
        ("cuda", CUDA_TORCH, "ok"),
        ("cuda", CPU_TORCH, "problem"),
        ("host", CPU_TORCH, "ok"),
        ("host", CUDA_TORCH, "problem"),
    ],
)
def test_a_transfer_engine_for_another_device_is_a_problem(engine, torch, state):
    line, *_ = checks(torch, engine, measures=False)
    assert (line.name, line.state) == ("transfer engine", state)


@pytest.mark.parametrize(("torch", "why"), [(None, "not installed"), (CPU_TORCH, "without CUDA")])
def test_without_a_torch_for_cuda_no_gpu_is_looked_for(torch, why):
    (line,) = checks(torch)
    assert (line.name, line.state) == ("GPU", "not checked")
    assert why in line.found


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch):
    """No engine with this torch would start: no driver, an old one, no GPU, a broken torch."""
    torch = pytest.importorskip("torch", reason="needs torch, which is not installed")

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch.cuda, "init", fail)
    (line,) = checks(CUDA_TORCH)
    assert (line.name, line.state) == ("GPU", "problem")
    assert line.found == "The NVIDIA driver on your system is too old"
    assert line.needed == "a GPU and a driver for CUDA 13.0"
    assert "CUDA_VISIBLE_DEVICES" in line.remedy
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    (line,) = checks(CUDA_TORCH)
    assert line.state == "problem"
    assert "import of torch halted" in line.found


@pytest.mark.parametrize(
    ("store", "load", "link", "state"),
    [
        (50e9, 49e9, Link(32.0, 16, 16), "ok"),
        (50e9, 20e9, Link(32.0, 16, 16), "warning"),
        (50e9, 20e9, Link(16.0, 8, 8), "ok"),
        (12e9, 12e9, Link(32.0, 4, 16), "warning"),  # a card in a slot with too few lanes
        (5e9, 2e9, None, "not checked"),
    ],
)
def test_rates_against_the_link(store, load, link, state):
    check = judge_rates("copy rate", Rates(store, load, "the kernels"), link)
    assert check.state == state
    assert f"{store / 1e9:.1f} GB/s to host memory, {load / 1e9:.1f} GB/s back" in check.found
    assert link is None or f"{link.lanes} of {link.max_lanes} lanes" in check.found


@pytest.mark.parametrize(
    ("speed", "lanes", "link"),
    [
        ("32.0 GT/s PCIe", "8", Link(32.0, 8, 16)),
        ("Unknown", "16", None),
        ("32.0 GT/s PCIe", "0", None),  # as in a guest
        (None, None, None),
    ],
)
def test_the_link_of_a_gpu_is_read_where_the_system_has_it(tmp_path, speed, lanes, link):
    folder = tmp_path / "bus/pci/devices/0000:1a:00.0"
    folder.mkdir(parents=True)
    files = {"current_link_speed": speed, "current_link_width": lanes, "max_link_width": "16"}
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(f"{text}\n")
    assert read_link("0000:1A:00.0", tmp_path) == link


@pytest.mark.parametrize("yields", [True, False])
def test_a_copy_engine_that_does_not_yield_is_a_warning(yields):
    check = judge_gates("copy engine of cuda:0", GateReport(yields, "3 small loads took 9 pieces"))
    assert check.state == ("ok" if yields else "warning")
    assert check.found == "3 small loads took 9 pieces"
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in check.remedy) is not yields


@pytest.mark.parametrize("packs", [False, True])
def test_the_host_copies_both_ways(packs, monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch, which is not installed")
    monkeypatch.setattr(copies, "BLOCKS", 4)
    rates = measure(torch.device("cpu"), packs=packs)
    assert min(rates.store, rates.load) > 0
