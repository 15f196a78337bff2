"""vLLM's planning of the KV cache, which moved to another module in 0.33, and specs for it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

get_kv_cache_config_from_groups = planning.get_kv_cache_config_from_groups
get_kv_cache_groups = planning.get_kv_cache_groups
groups_of_stage = planning._project_kv_cache_groups_to_worker

SCALED: dict[str, dict[str, Any]] = {
    "int8_per_token_head": {
        "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD,
        "dtype": torch.int8,
    },
    "fp8_per_token_head": {
        "kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD,
        "dtype": torch.float8_e4m3fn,
    },
}
"""Spec fields of cache types with one scale per token and head."""


def attention_spec(tokens: int, kind: type = FullAttentionSpec, **more: Any) -> Any:
    """Return the spec of an attention layer with a small head, as for vLLM's Triton backend."""
    shape = {"block_size": tokens, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    spec = kind(**{**shape, **more})
    customize = getattr(TritonAttentionBackend, "customize_spec", None)
    return spec if customize is None else customize(spec)
