"""Run in a separate process: a busy engine of several ranks, whose copies fail or take very long.

usage: python -m tests.engine.pressure_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

The GPU's cache has too little room for what runs at once, so blocks come and go all the time. Every
answer is compared with that of an engine without the plugin. On a GPU this needs
`VLLM_BATCH_INVARIANT=1`, so that tokens do not depend on the rest of a batch. Returns the input of
`check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import LLM

from tests.engine.harness import engine_settings, greedy
from tests.support.inputs import Tokens, busy_requests, transfer_config
from tests.support.processes import be_run, shut_down

SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 260, "max_num_seqs": 16}
FAULTS = ("refused", "failed")
DISTURBED: dict[str, tuple[list[int], str | None]] = {
    "nothing": ([], None),
    "all ranks fail": ([0, 1], "fail"),
    "one rank fails": ([1], "fail"),
    "one rank is slow": ([1], "slow"),
}
"""The faulty ranks by phase, and their fault; see `rank_faults`."""
LAST = [*DISTURBED][-1]


def check(result: dict[str, Any]) -> None:
    """Check that no token is wrong and no block is lost, whichever rank was faulty."""
    for phase, (ranks, how) in DISTURBED.items():
        found = result[phase]
        assert found["wrong"] == 0, (phase, found)
        assert found["all back"] is True, (phase, found)
        for rank, did in enumerate(found["ranks"]):
            assert {"store", "load", "synchronous load"} <= did.keys(), (phase, found)
            faults = [kind for kind in did if kind.split()[-1] in FAULTS]
            slow = [kind for kind in did if kind.endswith("slow")]
            badly = rank in ranks
            assert bool(faults) == (badly and how == "fail"), (phase, found)
            assert bool(slow) == (badly and how == "slow"), (phase, found)
            if badly and how == "fail":
                assert {"load failed", "load refused", "synchronous load refused"} <= set(faults)
                assert {"store failed", "store refused"} <= set(faults), found
    assert result["control"]["wrong"] > 0, "wrong KV must change tokens"


def answer_all(llm: LLM, asked: dict[str, tuple[Tokens, int]]) -> list[Tokens]:
    """Answer `busy_requests`, all at once."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in asked.values()],
        [greedy(max_tokens) for _, max_tokens in asked.values()],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from tests.engine import rank_faults

    asked = busy_requests(arguments.pop("requests"))
    settings = engine_settings(Path(models), kind, **{**SETTINGS, **arguments})

    # On one GPU, since a pipeline of runner V1 without the plugin can give wrong tokens.
    plain = LLM(**{**settings, "pipeline_parallel_size": 1})
    expected = answer_all(plain, asked)
    shut_down(plain)
    del plain
    llm = LLM(**settings, kv_transfer_config=transfer_config({"cpu_bytes": "256MiB"}))
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    result: dict[str, Any] = {"asynchronous": bool(scheduler.async_scheduling)}

    def wrong() -> int:
        assert llm.reset_prefix_cache()
        return sum(a != b for a, b in zip(answer_all(llm, asked), expected, strict=True))

    for phase, disturbed in DISTURBED.items():
        llm.collective_rpc(rank_faults.disturb, args=disturbed)
        # The second time, mostly from host memory.
        result[phase] = {"wrong": wrong() + wrong()}
        result[phase]["ranks"] = llm.collective_rpc(rank_faults.happened)
        if phase != LAST:
            # Refused while anything holds a block or a slot.
            result[phase]["all back"] = llm.reset_prefix_cache(reset_connector=True)
    llm.collective_rpc(rank_faults.mix_up)
    result["control"] = {"wrong": wrong()}
    result[LAST]["all back"] = llm.reset_prefix_cache(reset_connector=True)
    shut_down(llm)
    return result


if __name__ == "__main__":
    be_run(main)
