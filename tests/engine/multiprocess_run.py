"""Run by `run_engine` in a process of its own: an engine whose core has its own process.

usage: python -m tests.engine.multiprocess_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_engine(
    models: Path, kind: str, arguments: dict[str, Any], **environment: str
) -> dict[str, Any]:
    """Run `main` in a process of its own; return what it found."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.engine.multiprocess_run",
            str(models),
            kind,
            json.dumps(arguments),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"exit status {run.returncode}\n{run.stdout[-4000:]}\n{run.stderr[-6000:]}"
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def main(models: str, kind: str, arguments: dict[str, Any]) -> None:
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
        settings = {
            "model": str(write_model(kind, Path(models) / kind)),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": 16 << 20,
            "num_gpu_blocks_override": 400,
            "max_model_len": 1024,
            "dtype": "float32",
            "seed": 0,
            "disable_log_stats": False,
            **arguments,
            **more,
        }
        return LLM(**settings)

    def answers(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    plain = start()
    result: dict[str, Any] = {"expected": answers(plain)}
    plain.llm_engine.engine_core.shutdown()
    del plain

    llm = start(kv_transfer_config=transfer_config({}))
    result["computed"] = answers(llm)
    result["reset"] = llm.reset_prefix_cache()
    result["reloaded"] = answers(llm)
    result["metrics"] = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:host_kv_cache_") and hasattr(metric, "value")
    }
    result["ranks"] = llm.collective_rpc(corrupt)
    llm.reset_prefix_cache()
    result["corrupted"] = answers(llm)
    # Straight after an answer, while its stores are under way.
    llm.sleep(level=1)
    llm.wake_up()
    result["after_sleep"] = answers(llm)
    result["reset_with_connector"] = llm.reset_prefix_cache(reset_connector=True)
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(result), flush=True)


def corrupt(_worker: Any) -> int:
    """Flip a bit in every byte of this rank's host memory; return the rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    rank = get_kv_transfer_group().offload_worker
    assert rank._engine.wait(10)
    rank._engine._state.arena.view()[:] ^= 0x40
    return int(rank._rank)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `corrupt`
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
