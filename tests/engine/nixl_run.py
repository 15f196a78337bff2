"""Run in a separate process: two engines, one of which sends the other what it has computed.

usage: python -m tests.engine.nixl_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

Both have a MultiConnector of ours and vLLM's NixlConnector, ours first in the prefill engine and
last in the decode engine, as docs/use/multi_connector.md says. On a host with GPUs each engine has
its own. Returns the input of `check`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.platforms import current_platform

from tests.engine.harness import all_differ, engine_settings, greedy
from tests.engine.multiprocess_run import PROMPT_TOKENS
from tests.support.configurations import around
from tests.support.inputs import random_tokens, transfer_config
from tests.support.mooncake import free_port
from tests.support.processes import be_run, shut_down


def check(result: dict[str, Any]) -> None:
    """Check that every answer was right, and came from the right place.

    For received blocks, vLLM says how many tokens the sending engine had not computed.
    """
    expected, cached = result["expected"], result["cached"]
    none, whole = [0] * len(PROMPT_TOKENS), [tokens - 1 for tokens in PROMPT_TOKENS]
    for phase, answers in result["answers"].items():
        if phase.startswith("sent"):
            assert all(len(answer) == 1 for answer in answers), "one token to send the prompt"
        elif phase.endswith("corrupted"):
            assert all_differ(answers, expected), "wrong KV must change tokens"
        else:
            assert answers == expected, phase
        by_need = none if phase in ("sent", "received") else whole
        assert all(c >= n for c, n in zip(cached[phase], by_need, strict=True)), (phase, cached)
    assert cached["sent"] == none
    assert all(told["do_remote_prefill"] for told in result["told"])
    assert result["all back"] == [True, True]


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from tests.engine import rank_faults

    settings = engine_settings(Path(models), kind, max_model_len=1024, **arguments)
    prompts = [random_tokens(count, seed=count) for count in PROMPT_TOKENS]
    device = "cpu" if current_platform.is_cpu() else "cuda"
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": device}

    def start(gpu: int, *, first: bool) -> LLM:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        members = [transfer_config({}), nixl]
        config = around(*(members if first else members[::-1]), role="kv_both")
        return LLM(**settings, kv_transfer_config={**config, "kv_buffer_device": device})

    def ask(llm: LLM, phase: str, tokens: int, params: list[Any] | None = None) -> list[Any]:
        """Answer the prompts one by one; return what a receiving engine needs."""
        outputs = [
            llm.generate(
                [{"prompt_token_ids": prompt}],
                greedy(tokens, extra_args={"kv_transfer_params": more} if more else None),
                use_tqdm=False,
            )[0]
            for prompt, more in zip(prompts, params or [None] * len(prompts), strict=True)
        ]
        result["answers"][phase] = [list(output.outputs[0].token_ids) for output in outputs]
        result["cached"][phase] = [output.num_cached_tokens for output in outputs]
        return [output.kv_transfer_params for output in outputs]

    result: dict[str, Any] = {"answers": {}, "cached": {}}
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    plain = LLM(**settings)
    ask(plain, "sent", 8)
    result["expected"] = result["answers"].pop("sent")
    shut_down(plain)
    computes, answers = start(0, first=True), start(1, first=False)
    to_send = [{"do_remote_decode": True}] * len(prompts)
    result["told"] = ask(computes, "sent", 1, to_send)
    ask(answers, "received", 8, result["told"])
    assert answers.reset_prefix_cache()
    ask(answers, "received before", 8)
    assert answers.reset_prefix_cache()
    answers.collective_rpc(rank_faults.mix_up)
    ask(answers, "received before, corrupted", 8)
    # The prefill engine has them in host memory, too.
    for corrupted in ("", ", corrupted"):
        if corrupted:
            computes.collective_rpc(rank_faults.mix_up)
        for llm in (computes, answers):
            assert llm.reset_prefix_cache(reset_connector=llm is answers)
        told = ask(computes, f"sent from host memory{corrupted}", 1, to_send)
        ask(answers, f"received from host memory{corrupted}", 8, told)
    engines = (computes, answers)
    result["all back"] = [llm.reset_prefix_cache(reset_connector=True) for llm in engines]
    for llm in engines:
        shut_down(llm)
    return result


if __name__ == "__main__":
    be_run(main)
