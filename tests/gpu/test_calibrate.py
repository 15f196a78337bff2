"""Measuring the copy paths on the device at hand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("cupy", reason="CuPy, which compiles the kernels, is not installed")

from kv_swap import calibrate  # noqa: E402
from kv_swap.calibration import MEASURED_BY, PAGE_BYTES, PAGES, read_cached, write_cached  # noqa: E402
from kv_swap.engine import Direction  # noqa: E402
from kv_swap.path_rule import MeasuredRule, OnlyPath  # noqa: E402

pytestmark = pytest.mark.gpu

SECONDS = 30 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Two seconds are promised on a device of one's own, which tests side by side do not have."""


def test_it_measures_every_point_in_time_and_the_rule_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", 0)
    assert calibrate.rule_for(device) == OnlyPath("kernel")
    calibrate.measure(device)  # compiles
    started = time.perf_counter()
    calibration = calibrate.measure(device)
    assert time.perf_counter() - started < SECONDS
    assert calibration.key.name == torch.cuda.get_device_name()
    assert calibration.key.measured_by == MEASURED_BY
    grids = calibration.grids()
    assert set(grids) == {(path, way) for path in ("kernel", "dma") for way in Direction}
    for gbps in grids.values():
        assert gbps.shape == (len(PAGE_BYTES), len(PAGES))
        assert (gbps > 0).all()
        assert gbps[-1, -1] > 1  # 64 MiB: no link is slower
    write_cached(calibration)
    assert read_cached(calibrate.describe(device)) == calibration
    assert calibrate.rule_for(device) == MeasuredRule(calibration)
