"""Copies of a busy engine fail on a GPU: no wrong token, no hang, no dead engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_module

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

REQUESTS = 428


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1", "V2"])
def test_every_answer_is_right_while_copies_fail(
    tmp_path: Path, runner: str, async_scheduling: bool
) -> None:
    result = run_module(
        "tests.gpu.fault_run",
        tmp_path,
        {"requests": REQUESTS, "async_scheduling": async_scheduling},
        timeout_seconds=500,
        VLLM_BATCH_INVARIANT="1",
        VLLM_USE_V2_MODEL_RUNNER=runner,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    print(result)
    assert result["asynchronous"] == async_scheduling
    for name in ("without faults", "with faults", "with faults again", "silent layer"):
        found = result[name]
        assert (found["wrong"], found["answered"]) == (0, REQUESTS), name
        assert found["blocks_loaded"] > 0, name
        assert found["totals"]["hook_errors"] == 0, name
    calm = result["without faults"]
    assert calm["ended"] == calm["totals"]["repaired_loads"] == calm["totals"]["failed_loads"] == 0
    faulty = result["with faults"]
    assert faulty["totals"]["synchronous_loads"] > 0
    assert faulty["totals"]["repaired_loads"] > 0
    assert faulty["totals"]["failed_loads"] > 0
    assert faulty["ended"] == faulty["totals"]["lost_requests"] < REQUESTS / 10
    assert {"synchronous load, refused", "load, launch", "store, launch"} <= result["faults"].keys()
    assert result["control"]["wrong"] > 0, "wrong KV must change tokens"
