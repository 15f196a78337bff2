"""Describes the machine of a measurement, and writes results to the results folder."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

RESULTS_VARIABLE = "KV_OFFLOAD_BENCH_RESULTS"
"""Folder for the results of pytest benchmarks; without it, no results are written."""

COMMIT_VARIABLE = "KV_OFFLOAD_BENCH_COMMIT"
"""The commit, if git is not available in the checkout."""


def machine() -> dict[str, Any]:
    """Describe this machine: CPU, GPU, driver and versions."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        # A load above the number of cores that a benchmark uses means that others used them too.
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "vllm": getattr(vllm_module(), "__version__", None),
        "commit": os.environ.get(COMMIT_VARIABLE)
        or output_of("git", "rev-parse", "--short", "HEAD"),
    }
    torch = cuda_torch()
    if torch is not None:
        import cupy

        query = "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current"
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["driver"] = output_of("nvidia-smi", query, "--format=csv,noheader", "--id=0")
        facts["torch"] = torch.__version__
        facts["cupy"] = cupy.__version__
        facts["cuda_driver"] = cupy.cuda.runtime.driverGetVersion()
    return facts


def write_result(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Write a result as JSON atomically, and create its folder; without `indent`, as one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps(document, indent=indent) + "\n")
    written.replace(path)


def keep_rows(name: str, rows: list[Any], **facts: Any) -> None:
    """Write rows to the file `name` in the folder named by `RESULTS_VARIABLE`, if that is set."""
    folder = os.environ.get(RESULTS_VARIABLE)
    if folder and rows:
        write_result(Path(folder) / name, {"machine": machine(), **facts, "rows": rows})


def cuda_torch() -> Any:
    """Return torch if it has a CUDA device and CuPy is installed, else None."""
    try:
        import cupy  # noqa: F401
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def vllm_module() -> Any:
    """Return vllm, or None. Hides warnings on its import that do not concern this project."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm
            import vllm._custom_ops
        except ImportError:
            return None
    return vllm


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def output_of(*command: str) -> str | None:
    """Return the output of a command; None if it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
