"""`kv-offload size` tells what a slot of a real engine, and a prompt that it stores, take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.platforms.cpu import CpuPlatform

from kv_offload.engines.vllm.versions import vllm_version
from kv_offload.sizing.model import read_model
from kv_offload.sizing.slots import slot_size
from tests.engine.harness import BLOCK_TOKENS, engine, random_tokens
from tests.engine.multiprocess_run import LATENT, cache_prefixes_of_latents
from tests.support.configurations import RETENTION

BLOCKS = 8


@pytest.mark.parametrize(("kind", "groups"), [("qwen3", 1), ("gemma3", 2), ("llama4", 2)])
def test_heads_windows_and_chunks(model_folder: Path, kind: str, groups: int) -> None:
    assert check(model_folder, kind, BLOCK_TOKENS) == groups


@pytest.mark.skipif(
    vllm_version() < (0, 32), reason="this vLLM's CPU engine cannot run latent attention"
)
def test_latent_attention(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "check_and_update_config"
    monkeypatch.setattr(CpuPlatform, name, getattr(CpuPlatform, name))  # restored at the end
    cache_prefixes_of_latents("deepseek_v2")
    assert check(model_folder, "deepseek_v2", **LATENT) == 1


def check(model_folder: Path, kind: str, block_size: int, **arguments: Any) -> int:
    """Compare a slot, and what one stored prompt takes, with what is told; return the groups."""
    with engine(model_folder, kind, plugin={}, block_size=block_size, **arguments) as running:
        size = slot_size(
            read_model(model_folder / kind),
            tensor_parallel_size=1,
            cache_dtype="float32",
            block_tokens=block_size,
        )
        assert running.block_bytes == size.slot_bytes
        running.generate([random_tokens(BLOCKS * block_size + 1, seed=1)], max_tokens=1)
        running.settle()
        running.reset_gpu_cache()
        if getattr(running.core.vllm_config.cache_config, RETENTION, None) == 0:
            stored_bytes = BLOCKS * size.block_bytes + size.prompt_bytes
        else:
            stored_bytes = BLOCKS * block_size * size.windowed_token_bytes
        assert running.totals["stored_bytes"] == stored_bytes
        assert running.totals["skipped_moved_on"] == 0, "what vLLM does not keep is not missed"
        return sum(size.groups.values())
