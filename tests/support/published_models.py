"""The config.json of well-known models, as far as it determines their KV cache size."""

from __future__ import annotations

from typing import Any


def _dense(kind: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> Any:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
        **more,
    }


_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _dense("llama", 32, 32, 8, 4096),
    "Llama-3.1-70B": _dense("llama", 80, 64, 8, 8192),
    "Qwen3-8B": _dense("qwen3", 36, 32, 8, 4096, head_dim=128, use_sliding_window=False),
    "Qwen3-32B": _dense("qwen3", 64, 64, 8, 5120, head_dim=128, use_sliding_window=False),
    "Qwen3-235B-A22B": _dense(
        "qwen3_moe", 94, 64, 4, 4096, head_dim=128, use_sliding_window=False, sliding_window=None
    ),
    "gpt-oss-120b": _dense(
        *("gpt_oss", 36, 64, 8, 2880),
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 18,
    ),
    "gemma-3-27b": {
        "model_type": "gemma3",
        # It leaves to the defaults which layers have a window: five, then one without.
        "text_config": _dense("gemma3_text", 62, 32, 16, 5376, head_dim=128, sliding_window=1024),
    },
    "DeepSeek-V3": _dense("deepseek_v3", 61, 128, 128, 7168, **_LATENT),
    "DeepSeek-V3.2": _dense(
        *("deepseek_v32", 61, 128, 128, 7168),
        **_LATENT,
        index_topk=2048,
        index_n_heads=64,
        index_head_dim=128,
    ),
    "DeepSeek-V4-Flash": _dense(
        *("deepseek_v4", 43, 64, 1, 4096),
        head_dim=512,
        sliding_window=128,
        index_topk=512,
        index_n_heads=64,
        index_head_dim=128,
        compress_ratios=[128, 128, 128, *[4, 128] * 20],
    ),
    "GLM-5": _dense(
        *("glm_moe_dsa", 78, 64, 64, 6144),
        **(_LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256}),
        index_topk=2048,
        index_n_heads=32,
        index_head_dim=128,
    ),
    "Nemotron-3-Nano-30B-A3B": _dense(
        *("nemotron_h", 52, 32, 2, 2688),
        head_dim=128,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
        mamba_ssm_cache_dtype="float32",
    ),
    "Mistral-7B-v0.1": _dense("mistral", 32, 32, 8, 4096, sliding_window=4096),
    "Granite-4.0-H-Small": _dense(
        *("granitemoehybrid", 40, 32, 8, 4096),
        layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 4] * 4,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    "Qwen3-Next-80B-A3B": _dense(
        *("qwen3_next", 48, 16, 2, 2048),
        head_dim=256,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 12,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
    ),
}
"""Hugging Face's config.json by name, less what does not determine the size of the KV cache.

Compared with what the models' makers, or their libraries, say of these checkpoints: Llama with
`models/sku_list.py` of meta-llama/llama-models, Qwen3 with `gpt/model/qwen3.py` of NVIDIA/NeMo,
gpt-oss with `gpt_oss/torch/model.py` of openai/gpt-oss, gemma with `gemma/config.py` of
google/gemma_pytorch; DeepSeek, GLM, Qwen3-Next and Mistral with the defaults of their classes in
transformers. Granite and Nemotron are as others cite their config.json.
"""
