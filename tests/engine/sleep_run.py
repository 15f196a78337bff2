"""Run by `test_sleep.py` in a process of its own: what host memory serves after sleep and reload.

usage: python -m tests.engine.sleep_run MODELS_FOLDER

Prints one line of JSON: the answers without the plugin, and those after each event with how many
tokens of the prompts came from host memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(models: str) -> None:
    from vllm import LLM

    from bench.small_models import write_model
    from tests.engine.harness import (
        BLOCK_TOKENS,
        greedy,
        prompts_with_shared_prefix,
        transfer_config,
    )

    prompts = [{"prompt_token_ids": p} for p in prompts_with_shared_prefix(seed=3)]

    def start(**more: Any) -> LLM:
        return LLM(
            model=str(write_model("qwen3", Path(models) / "qwen3")),
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=16 << 20,
            num_gpu_blocks_override=400,
            max_model_len=1024,
            dtype="float32",
            seed=0,
            disable_log_stats=False,
            **more,
        )

    def answers(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    plain = start()
    result: dict[str, Any] = {"expected": answers(plain)}
    plain.llm_engine.engine_core.shutdown()
    del plain

    llm = start(kv_transfer_config=transfer_config({"keep_on_sleep": True}))

    def hit_tokens() -> float:
        return sum(
            metric.value
            for metric in llm.get_metrics()
            if metric.name == "vllm:host_kv_cache_hit_tokens"
        )

    def after(event: Callable[[], Any]) -> tuple[list[list[int]], float]:
        event()
        before = hit_tokens()
        return answers(llm), hit_tokens() - before

    def sleep(level: int) -> None:
        llm.sleep(level=level)
        llm.wake_up()

    def reload() -> None:
        llm.collective_rpc("reload_weights")
        assert llm.reset_prefix_cache()

    result["start"] = after(lambda: None)
    result["sleep 1"] = after(lambda: sleep(1))
    result["reload"] = after(reload)
    result["sleep 1 again"] = after(lambda: sleep(1))
    result["sleep 2"] = after(lambda: sleep(2))
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    main(sys.argv[1])
