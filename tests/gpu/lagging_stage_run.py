"""Run in a separate process: runner V1's pipeline on two GPUs, whose first stage lags.

usage: python -m tests.gpu.lagging_stage_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

The GPU of the first stage starts each step so late that the next one has been prepared by then: a
step whose inputs are rewritten too early gives other tokens. Needs `VLLM_BATCH_INVARIANT=1` and
`VLLM_USE_V2_MODEL_RUNNER=0`. Returns the input of `check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.v1.engine.exceptions import EngineDeadError

from tests.engine.harness import engine_settings
from tests.engine.pressure_run import SETTINGS, answer_all
from tests.support.inputs import busy_requests, transfer_config
from tests.support.processes import be_run, shut_down

REQUESTS = 60


def check(result: dict[str, Any]) -> None:
    """Check that no token is wrong, but that some are, or vLLM crashes, without the plugin."""
    assert result["wrong"] == 0, result
    assert result["loads"] > 0, result
    wrong, crash = result["control"]["wrong"], result["control"]["crash"]
    assert wrong or crash, "vLLM guards the inputs of a pipeline: guard_inputs can go"
    print(f"the control crashed: {crash}" if crash else f"{wrong} wrong answers in the control")


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from tests.engine import rank_faults

    asked = busy_requests(REQUESTS)
    settings = engine_settings(Path(models), kind, **{**SETTINGS, **arguments})

    plain = LLM(**{**settings, "pipeline_parallel_size": 1})
    expected = answer_all(plain, asked)
    shut_down(plain)
    del plain

    def wrong(llm: LLM) -> int:
        assert llm.reset_prefix_cache()
        return sum(a != b for a, b in zip(answer_all(llm, asked), expected, strict=True))

    llm = LLM(**settings, kv_transfer_config=transfer_config({"cpu_bytes": "256MiB"}))
    llm.collective_rpc(rank_faults.disturb, args=([], None))
    llm.collective_rpc(rank_faults.lag, args=([0],))
    # The second time, mostly from host memory.
    result: dict[str, Any] = {"wrong": wrong(llm) + wrong(llm)}
    copied = llm.collective_rpc(rank_faults.happened)
    result["loads"] = min(did.get("load", 0) + did.get("synchronous load", 0) for did in copied)
    shut_down(llm)
    del llm

    plain = LLM(**settings)
    plain.collective_rpc(rank_faults.lag, args=([0],))
    try:
        result["control"] = {"wrong": wrong(plain), "crash": ""}
    except EngineDeadError as error:  # for instance, positions that are those of another step
        result["control"] = {"wrong": None, "crash": str(error)}
    else:
        shut_down(plain)
    return result


if __name__ == "__main__":
    be_run(main)
