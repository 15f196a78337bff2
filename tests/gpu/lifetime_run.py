"""Run by `test_lessons.py` in a process of its own: which KV tensors outlive an engine on a GPU.

usage: python -m tests.gpu.lifetime_run MODELS_FOLDER

Prints one line of JSON: KV tensors registered with the plugin and still alive after the engine's
end, those of the profiling run before, and the bytes that torch has allocated after an engine
without and one with the plugin.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kv_offload.worker import OffloadWorker
from tests.engine.harness import engine, random_tokens


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def main(models: str) -> None:
    registered: list[weakref.ref[Any]] = []
    profiling: list[weakref.ref[Any]] = []
    result: dict[str, Any] = {"profiling_alive": 0}
    register = OffloadWorker.register_kv_caches
    clean_up = GPUModelRunner._cleanup_profiling_kv_cache

    def watch_register(worker: OffloadWorker, kv_caches: dict[str, Any]) -> None:
        # The profiling run is over here; its tensors must be gone.
        result["profiling_alive"] += alive(profiling)
        registered.extend(map(weakref.ref, kv_caches.values()))
        register(worker, kv_caches)

    def watch_clean_up(runner: Any) -> None:
        tensors = [t for t in getattr(runner, "kv_caches", ()) if isinstance(t, torch.Tensor)]
        if not registered:
            profiling.extend(map(weakref.ref, tensors))
        del tensors
        clean_up(runner)

    # Without a size for the KV cache, vLLM profiles, CUDA graphs included.
    settings = {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.3,
    }
    prompt = random_tokens(300, seed=1)
    with engine(Path(models), **settings) as plain:
        plain.generate([prompt])
    del plain
    gc.collect()
    result["allocated_without"] = torch.cuda.memory_allocated()
    OffloadWorker.register_kv_caches = watch_register  # type: ignore[method-assign]
    GPUModelRunner._cleanup_profiling_kv_cache = watch_clean_up
    with engine(Path(models), plugin={}, **settings) as ours:
        ours.generate([prompt])
        ours.reset_gpu_cache()
        ours.generate([prompt])
        assert ours.blocks_loaded() > 0
    del ours
    result["registered"], result["alive"] = len(registered), alive(registered)
    result["profiling"] = len(profiling)
    result["allocated_with"] = torch.cuda.memory_allocated()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
