"""Runs a module of the tests in a process of its own and brings back what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_module(
    module: str, *arguments: object, timeout_seconds: float = 500, **environment: str
) -> Any:
    """Run `python -m module`; return what it gave to `print_result`.

    Arguments that are not text or paths are passed as JSON. The process sees this checkout before
    any installed copy, and `environment` besides what this process has.
    """
    words = [str(a) if isinstance(a, str | Path) else json.dumps(a) for a in arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    run = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    ended = f"{module} {words}: exit status {run.returncode}"
    assert lines, f"{ended}\n{run.stdout[-4000:]}\n{run.stderr[-6000:]}"
    return json.loads(lines[0].removeprefix("RESULT "))


def print_result(result: object) -> None:
    """Give `run_module` what was found; once a process."""
    print("RESULT " + json.dumps(result), flush=True)
