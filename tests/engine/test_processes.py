"""The engine core in a process of its own, and ranks in processes of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_round_trip_reset_and_sleep(model_folder: Path, ranks: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.multiprocess_run", str(model_folder), str(ranks)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"exit status {run.returncode}\n{run.stdout[-4000:]}\n{run.stderr[-6000:]}"
    result = json.loads(lines[0].removeprefix("RESULT "))
    expected = result["expected"]
    assert result["computed"] == expected
    assert result["reset"] is True
    assert result["reloaded"] == expected
    metrics = result["metrics"]
    assert metrics["vllm:host_kv_cache_loaded_bytes"] > 0
    assert metrics["vllm:host_kv_cache_stored_bytes"] >= metrics["vllm:host_kv_cache_loaded_bytes"]
    assert metrics["vllm:host_kv_cache_hit_tokens"] > 0
    assert sorted(result["ranks"]) == list(range(ranks))
    assert all(a != b for a, b in zip(result["corrupted"], expected, strict=True))
    # Sleeping empties host memory, since the engine may wake up with other weights.
    assert result["after_sleep"] == expected
    assert result["reset_with_connector"] is True
