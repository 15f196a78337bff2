"""What `kv-offload doctor` reads from a real driver and measures on a real link."""

from __future__ import annotations

from typing import Any

import pytest

from kv_offload.tools.doctor.devices import check_links, check_nodes, check_rates
from kv_offload.tools.doctor.installation import check_driver, read_torch
from kv_offload.tools.doctor.nvml import read_machine

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


def test_the_driver_runs_the_torch_that_runs_here():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert check_driver(read_torch(), read_machine()).state == "ok"


def test_every_gpu_has_a_link_and_a_node():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    machine = read_machine()
    assert len(machine.gpus) >= torch.cuda.device_count()
    assert len([*check_links(machine)]) == len(machine.gpus)
    assert [*check_nodes(machine)]


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_every_gpu_is_measured(kind):
    checks = [*check_rates(read_machine(), read_torch(), kind)]
    assert len(checks) == 2 * torch.cuda.device_count()
    for rates, gates in zip(checks[::2], checks[1::2], strict=True):
        assert "GB/s to host memory" in rates.found, rates
        assert "by the copy engine" in rates.found, "these blocks are long runs"
        assert gates.state == "ok", gates
