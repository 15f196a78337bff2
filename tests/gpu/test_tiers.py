"""Engines on a GPU with a disk or a store: what one has computed another one loads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import full_blocks
from tests.gpu.engine_run import PROMPTS
from tests.support.mooncake import PATIENT, Master, environment, require_mooncake
from tests.support.processes import kill_group, run_module, run_until_killed, start_module

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

RUN = "tests.gpu.tier_run"
BLOCKS = full_blocks(PROMPTS)
ALWAYS = {"load_or_recompute": "always_load"}  # a small model computes sooner


@pytest.fixture(params=["V1", "V2"])
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if request.param == "V2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONHASHSEED": "0",
    }


def check(result: dict[str, Any]) -> None:
    """Check that all but a twentieth of what was below was served, and that it was needed."""
    totals = result["totals"]
    print(totals)
    assert result["answers"] == result["expected"]
    assert totals["promoted_slots"] >= 0.95 * BLOCKS, totals
    assert result["loaded_blocks"] >= 0.95 * BLOCKS, totals
    wrong, right = result["corrupted"], result["expected"]
    assert all(w != r for w, r in zip(wrong, right, strict=True))


@pytest.mark.filterwarnings("default")
def test_a_disk_serves_an_engine_that_was_started_again_after_kill_9(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    plugin = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "256MiB", **ALWAYS}
    (tmp_path / "disk").mkdir()
    run_until_killed(RUN, "write", tmp_path, json.dumps(plugin), **variables)
    check(run_module(RUN, "serve", tmp_path, plugin, timeout_seconds=300, **variables))


@pytest.mark.filterwarnings("default")
def test_a_store_serves_what_another_engine_has_computed(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    require_mooncake()
    for name in ("out", "err"):
        (tmp_path / name).touch()
    more = environment() | PATIENT | variables
    ready = tmp_path / "ready"
    with Master(lease_seconds=10) as master:
        plugin = {"store": "mooncake", "store_master": master.address, **ALWAYS}
        first = start_module(
            *(RUN, "write", str(tmp_path), json.dumps(plugin | {"store_bytes": "256MiB"})),
            str(ready),
            stdout=tmp_path / "out",
            stderr=tmp_path / "err",
            forks=False,
            **more,
        )
        try:
            until = time.monotonic() + 240
            while not ready.exists():
                assert time.monotonic() < until, (tmp_path / "err").read_text()[-6000:]
                time.sleep(0.1)
            assert int(ready.read_text()) >= BLOCKS
            second = plugin | {"store_bytes": 0}
            check(run_module(RUN, "serve", tmp_path, second, timeout_seconds=300, **more))
        finally:
            kill_group(first)
