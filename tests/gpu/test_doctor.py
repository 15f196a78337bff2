"""What `kv-offload doctor` measures on a real link."""

from __future__ import annotations

from typing import Any

import pytest

from kv_offload.config import trace_config
from kv_offload.tools.doctor.gpus import check_gpus
from kv_offload.tools.doctor.installation import read_torch

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("packs", [False, True])
def test_every_gpu_is_measured(packs):
    config = trace_config({"cpu_bytes": "1GiB", "pack_kv": packs}, {}).config
    checks = {check.name: check for check in check_gpus(read_torch(), config, measures=True)}
    assert len(checks) == 3 * torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        assert checks[f"GPU {index}"].state == "ok"
        rates = checks[f"copy rate of cuda:{index}"]
        assert "GB/s to host memory" in rates.found, rates
        if packs:
            assert checks[f"packing on cuda:{index}"].state == "ok"
        else:
            assert "by the copy engine" in rates.found, "these blocks are long runs"
            assert checks[f"copy engine of cuda:{index}"].state == "ok"
