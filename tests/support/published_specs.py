"""The KV-cache specs of models that cannot be built here, with their makers' values.

Each has the specs that the model's layers request from vLLM (`get_kv_cache_spec` of 0.32 and 0.33),
with the fewest layers that include every kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

Specs = dict[str, Any]


def _latent(tokens: int, head_size: int, dtype: torch.dtype, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=tokens,
        num_kv_heads=1,
        **{"max_tp_shards": 1, "head_size": head_size, "dtype": dtype, **more},
    )


def _latent_window(
    tokens: int, head_size: int, dtype: torch.dtype, window: int, **more: Any
) -> Any:
    return SlidingWindowMLASpec(
        block_size=tokens,
        num_kv_heads=1,
        max_tp_shards=1,
        **{"head_size": head_size, "dtype": dtype, "sliding_window": window, **more},
    )


def _ring(tokens: int, head_size: int, dtype: torch.dtype, **more: Any) -> CircularBufferSpec:
    shape = {"num_kv_heads": 1, "head_size": head_size, "head_size_v": 0, "dtype": dtype}
    return CircularBufferSpec(block_size=tokens, **{**shape, **more})


def deepseek_v4(ratios: Sequence[int] = (1, 4, 128, 4, 128)) -> Specs:
    """Windows, latents of 4 and of 128 tokens, an indexer, and tokens not yet compressed."""
    packed = {"cache_dtype_str": "fp8_ds_mla", "alignment": 576, "model_version": "deepseek_v4"}
    specs: Specs = {}
    for layer, ratio in enumerate(ratios):
        specs[f"{layer}.swa"] = _latent_window(
            *(64, 512, torch.uint8, 128), state_content_bytes=584, **packed
        )
        if ratio <= 1:
            continue
        specs[f"{layer}.kv"] = _latent(
            *(256, 512, torch.uint8), tokens_per_state=ratio, state_content_bytes=584, **packed
        )
        states = {4: (4, 2 * 512 * 2, 8), 128: (8, 512 * 2, 128)}[ratio]
        specs[f"{layer}.compressor.state_cache"] = _latent_window(
            *(states[0], states[1], torch.float32, states[2]), alignment=576
        )
        if ratio == 4:
            specs[f"{layer}.indexer"] = _latent(
                *(256, 132, torch.uint8), tokens_per_state=4, alignment=576
            )
            specs[f"{layer}.indexer.compressor.state_cache"] = _latent_window(
                *(4, 2 * 128 * 2, torch.float32, 8), alignment=576
            )
    return specs


def deepseek_v41() -> Specs:
    """Like V4, with replayed windows, and rings."""
    packed = {"cache_dtype_str": "fp8_ds_mla", "alignment": 576, "model_version": "deepseek_v4"}
    specs: Specs = {}
    for layer, ratio in enumerate((0, 4, 2, 4)):
        specs[f"{layer}.swa"] = _latent_window(
            *(64, 512, torch.uint8, 128),
            state_content_bytes=584,
            bounded_replay=True,
            **packed,
        )
        if ratio:
            specs[f"{layer}.kv"] = _latent(
                *(256, 512, torch.uint8), tokens_per_state=ratio, state_content_bytes=584, **packed
            )
            specs[f"{layer}.ring"] = _ring(8, 2 * 512, torch.float32)
    return specs


def glm_5_next() -> Specs:
    """Latents, states, an indexer of pools of 4 tokens, and a ring for the open pool."""
    specs: Specs = {}
    for layer in range(4):
        if layer % 4 == 3:
            specs[f"{layer}.mla"] = _latent(128, 656, torch.uint8, cache_dtype_str="fp8_ds_mla")
            specs[f"{layer}.indexer"] = _latent(128, 132, torch.uint8, tokens_per_state=4)
            specs[f"{layer}.tail"] = _ring(
                *(4, 128, torch.bfloat16), num_kv_heads=2, dcp_sharded=False
            )
        else:
            specs[f"{layer}.kda"] = _state(128, 128 * 656)
    return specs


def step_5() -> Specs:
    """Attention with a summary of every 8 tokens, windows, and a ring for the open 8."""
    full: Specs = {"num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    page = 64 * 8 * 256 * 2
    return {
        "0.attn": FullAttentionSpec(block_size=64, **full),
        "0.summary": FullAttentionSpec(
            block_size=64,
            num_kv_heads=1,
            head_size=256,
            head_size_v=0,
            dtype=torch.uint8,
            tokens_per_state=8,
        ),
        "0.ring": _ring(64, page // (64 * 2), torch.bfloat16),
        "1.attn": SlidingWindowSpec(block_size=64, sliding_window=512, **full),
    }


def qwen_4() -> Specs:
    """Gated delta nets with attention, a compressed key of every 4 tokens, and a ring of keys."""
    specs: Specs = {}
    for layer in range(4):
        if layer % 4 == 3:
            specs[f"{layer}.attn"] = FullAttentionSpec(
                block_size=64, num_kv_heads=2, head_size=256, dtype=torch.bfloat16
            )
            specs[f"{layer}.keys"] = _latent(
                *(64, 128, torch.bfloat16), tokens_per_state=4, max_tp_shards=None
            )
            specs[f"{layer}.ring"] = _ring(4, 128, torch.bfloat16)
        else:
            specs[f"{layer}.gdn"] = _state(64, 64 * 2 * 512 * 2)
    return specs


def _state(tokens: int, page_bytes: int) -> MambaSpec:
    return MambaSpec(
        block_size=tokens,
        shapes=((3, 1024), (4, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=max(page_bytes, 6144 + 65536),
        mamba_cache_mode="align",
    )


def kimi_k3() -> Specs:
    """Latents and states."""
    specs: Specs = {f"{layer}.kda": _state(128, 128 * 576 * 2) for layer in range(3)}
    return specs | {"3.mla": _latent(128, 576, torch.bfloat16)}


MODELS = {
    "DeepSeek V4": deepseek_v4,
    "DeepSeek V4.1": deepseek_v41,
    "GLM-5.3": glm_5_next,
    "Step5": step_5,
    "Qwen4": qwen_4,
    "Kimi K3": kimi_k3,
}
"""Functions that return a model's specs by layer, by the model's name."""
