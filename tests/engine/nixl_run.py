"""Run in a process of its own: two engines, one of which sends to the other what it has computed.

usage: python -m tests.engine.nixl_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

Both have a MultiConnector of ours and vLLM's NixlConnector, ours first where prompts are computed
and last where they are answered, as docs/use/multi_connector.md says. On a host with GPUs each
engine has one of its own. Hands back what `check` checks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.inputs import Tokens, random_tokens
from tests.support.mooncake import free_port
from tests.support.processes import print_result

PROMPT_TOKENS = (129, 193, 257)


def check(result: dict[str, Any]) -> None:
    """Check who served what, and that it was right."""
    expected = result["expected"]
    whole = [tokens - 1 for tokens in PROMPT_TOKENS]
    for phase in ("sent", "received", "again from host memory", "sent from host memory"):
        tokens, cached = result[phase]["tokens"], result[phase]["cached"]
        if phase.startswith("sent"):
            assert [answer[0] for answer in expected] == [answer[0] for answer in tokens], phase
        else:
            assert tokens == expected, phase
        if phase == "sent":
            assert cached == [0] * len(PROMPT_TOKENS)
        else:
            assert all(c >= w for c, w in zip(cached, whole, strict=True)), (phase, cached)
    assert result["received from host memory"]["tokens"] == expected
    pairs = zip(result["corrupted"]["tokens"], expected, strict=True)
    assert all(wrong != right for wrong, right in pairs), "wrong KV must change tokens"
    assert result["all back"] == [True, True]


def main(models: str, kind: str, arguments: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.platforms import current_platform

    from tests.engine import rank_faults
    from tests.engine.harness import engine_settings, greedy
    from tests.support.configurations import around, ours

    settings = engine_settings(Path(models), kind, max_model_len=1024, **arguments)
    prompts = [random_tokens(count, seed=count) for count in PROMPT_TOKENS]
    device = "cpu" if current_platform.is_cpu() else "cuda"
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": device}

    def start(gpu: int, *, first: bool) -> LLM:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        members = [ours({"cpu_bytes": "64MiB"}, "kv_both"), nixl]
        config = around(*(members if first else members[::-1]), role="kv_both")
        return LLM(**settings, kv_transfer_config={**config, "kv_buffer_device": device})

    def ask(llm: LLM, tokens: int, params: list[Any] | None = None) -> tuple[dict[str, Any], Any]:
        """Answer the prompts one by one; return the answers, and what the next engine needs."""
        found: dict[str, Any] = {"tokens": [], "cached": []}
        told = []
        for prompt, more in zip(prompts, params or [None] * len(prompts), strict=True):
            sampling = greedy(tokens, extra_args={"kv_transfer_params": more} if more else None)
            (output,) = llm.generate([as_prompt(prompt)], sampling, use_tqdm=False)
            found["tokens"].append(list(output.outputs[0].token_ids))
            found["cached"].append(output.num_cached_tokens)
            told.append(output.kv_transfer_params)
        return found, told

    result: dict[str, Any] = {}
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    plain = LLM(**settings)
    result["expected"] = ask(plain, 8)[0]["tokens"]
    plain.llm_engine.engine_core.shutdown()
    computes, answers = start(0, first=True), start(1, first=False)
    to_send = [{"do_remote_decode": True}] * len(prompts)
    result["sent"], told = ask(computes, 1, to_send)
    result["received"], _ = ask(answers, 8, told)
    assert answers.reset_prefix_cache()
    result["again from host memory"], _ = ask(answers, 8)
    # The engine that computes has sent its blocks away, and has them in host memory.
    assert computes.reset_prefix_cache()
    result["sent from host memory"], told = ask(computes, 1, to_send)
    assert answers.reset_prefix_cache(reset_connector=True)
    result["received from host memory"], _ = ask(answers, 8, told)
    assert answers.reset_prefix_cache()
    answers.collective_rpc(rank_faults.mix_up)
    result["corrupted"], _ = ask(answers, 8)
    engines = (computes, answers)
    result["all back"] = [llm.reset_prefix_cache(reset_connector=True) for llm in engines]
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()
    print_result(result)


def as_prompt(tokens: Tokens) -> Any:
    return {"prompt_token_ids": tokens}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `rank_faults`
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
