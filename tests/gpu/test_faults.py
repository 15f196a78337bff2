"""Copies of a busy engine fail on a GPU: no wrong token, no hang, no dead engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

REQUESTS = 428


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("copies_with", ["kernels", "gates"])
def test_every_answer_is_right_while_copies_fail(run_in_every_mode, copies_with):
    result = run_in_every_mode("tests.gpu.fault_run", requests=REQUESTS, copies_with=copies_with)
    assert result["copies_with"] == copies_with
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
