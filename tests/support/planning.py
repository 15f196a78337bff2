"""vLLM's planning of the KV cache, which is in another module from 0.33 on."""

from __future__ import annotations

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

__all__ = ["get_kv_cache_config_from_groups", "get_kv_cache_groups"]
