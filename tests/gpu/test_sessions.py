"""Sessions whose prompt grows, with drafts and asynchronous scheduling, on a real engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.test_engine import CASES
from tests.support.processes import run_module

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

SESSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    name: CASES[name] for name in ("draft head", "gated delta nets, MTP", "Mamba 2, MTP")
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("case", SESSIONS)
def test_what_a_session_says_comes_back(tmp_path, case, runner):
    kind, arguments = SESSIONS[case]
    result = run_module(
        "tests.gpu.session_run",
        tmp_path,
        kind,
        arguments,
        timeout_seconds=400,
        VLLM_USE_V2_MODEL_RUNNER="1" if runner == "v2" else "0",
    )
    print(result)
    assert result["asynchronous"]
    assert result["drafts_accepted"] > 0
    assert result["blocks_loaded"] > 0
    assert result["answers"] == result["expected"]
    assert result["corrupted"] != result["expected"][1:]
