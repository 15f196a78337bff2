"""`kv-offload size` tells what a slot of a real engine, and a prompt that it stores, take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kv_offload.engines.vllm.versions import vllm_version
from kv_offload.tools.sizing.model import read_model
from kv_offload.tools.sizing.slots import slot_size
from tests.engine.harness import BLOCK_TOKENS, engine, random_tokens
from tests.support.configurations import RETENTION

BLOCKS = 8
STATES = {"dtype": "bfloat16", "enable_prefix_caching": True, "max_model_len": 4096}
since_0_32 = pytest.mark.skipif(
    vllm_version() < (0, 32), reason="this vLLM's CPU engine does not run its states"
)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("gemma3", {}), ("llama4", {}), pytest.param("qwen3_next", STATES, marks=since_0_32)],
)
def test_windows_chunks_and_states(
    model_folder: Path, kind: str, arguments: dict[str, Any]
) -> None:
    with engine(model_folder, kind, plugin={}, **arguments) as running:
        model = read_model(model_folder / kind)
        if model.state is not None:  # vLLM's CPU engine keeps recurrent states in 32 bits
            state = dataclasses.replace(model.state, recurrent_bytes=4)
            model = dataclasses.replace(model, state=state)
        size = slot_size(
            model,
            tensor_parallel_size=1,
            cache_dtype=arguments.get("dtype", "float32"),
            block_tokens=BLOCK_TOKENS,
        )
        assert running.block_bytes == size.slot_bytes
        assert sum(size.groups.values()) == 2
        running.generate([random_tokens(BLOCKS * size.block_tokens + 1, seed=1)], max_tokens=1)
        running.settle()
        running.reset_gpu_cache()
        if getattr(running.core.vllm_config.cache_config, RETENTION, None) == 0:
            stored_bytes = size.prompt_bytes
            stored_bytes += 0 if size.keeps_ends_only else BLOCKS * size.block_bytes
        else:
            stored_bytes = BLOCKS * size.block_tokens * size.windowed_token_bytes
        assert running.totals["stored_bytes"] == stored_bytes
        assert running.totals["skipped_moved_on"] == 0, "what vLLM does not keep is not missed"
