"""`kv-offload size` predicts a slot of a real engine, and the size of a stored prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kv_offload.tools.sizing.model import read_model
from kv_offload.tools.sizing.slots import SlotSize, slot_size
from tests.engine.harness import BLOCK_TOKENS, engine, random_tokens
from tests.support.latents import LATENT

BLOCKS = 8


STATES = {
    "dtype": "bfloat16", "enable_prefix_caching": True, "max_model_len": 4096,
    # vLLM chooses it by itself on a CPU with AVX-512 for bfloat16.
    "recurrent_bytes": 4, "mamba_ssm_cache_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "groups", "arguments"),
    [
        ("qwen3", 1, {}),
        ("mistral", 1, {}),
        ("gemma3", 2, {}),
        ("llama4", 2, {}),
        ("deepseek_v2", 1, LATENT),
        ("qwen3_next", 2, STATES),
    ],
)
@pytest.mark.usefixtures("cached_latents")
def test_heads_windows_chunks_latents_and_states(model_folder, kind, groups, arguments):
    assert check(model_folder, kind, **{"block_size": BLOCK_TOKENS, **arguments}) == groups


def test_states_of_mamba_2(model_folder):
    """Its CPU kernels cannot compute them, so only the slot is compared."""
    kind = "granitemoehybrid"
    with engine(model_folder, kind, plugin={}, enable_prefix_caching=True) as running:
        size = told(model_folder, kind, BLOCK_TOKENS, "float32")
        assert running.block_bytes == size.slot_bytes
        assert running.core.vllm_config.cache_config.block_size == size.block_tokens


def told(
    model_folder: Path,
    kind: str,
    block_size: int,
    cache_dtype: str,
    recurrent_bytes: int | None = None,
) -> SlotSize:
    model = read_model(model_folder / kind)
    if model.state is not None:
        state = dataclasses.replace(model.state, recurrent_bytes=recurrent_bytes)
        model = dataclasses.replace(model, state=state)
    return slot_size(
        model, tensor_parallel_size=1, cache_dtype=cache_dtype, block_tokens=block_size
    )


def check(
    model_folder: Path,
    kind: str,
    block_size: int,
    recurrent_bytes: int | None = None,
    dtype: str = "float32",
    **arguments: Any,
) -> int:
    """Compare a slot, and what one stored prompt takes, with the prediction; return the groups."""
    arguments |= {"block_size": block_size, "dtype": dtype}
    with engine(model_folder, kind, plugin={}, **arguments) as running:
        size = told(model_folder, kind, block_size, dtype, recurrent_bytes)
        assert running.block_bytes == size.slot_bytes
        running.generate([random_tokens(BLOCKS * size.block_tokens + 1, seed=1)], max_tokens=1)
        running.settle()
        running.reset_gpu_cache()
        stored_bytes = size.prompt_bytes
        stored_bytes += 0 if size.keeps_ends_only else BLOCKS * size.block_bytes
        assert running.totals["stored_bytes"] == stored_bytes
        assert running.totals["skipped_moved_on"] == 0, "what vLLM does not keep is not missed"
        return sum(size.groups.values())
