"""Says how large the pool is beside the engine's own KV cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def log_pool(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, num_slots: int) -> None:
    """Log what the pool holds in tokens and beside the engine's own cache; warn if it is smaller.

    A slot holds one block, so the two compare by their numbers. Tokens are those of vLLM's line
    `KV cache size`, which counts requests of the model's full length.
    """
    requests = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    engine_tokens = int(requests * vllm_config.model_config.max_model_len)
    ratio = num_slots / kv_cache_config.num_blocks
    logger.info(
        "kv-offload: host memory holds %d tokens, %.3g times the %d tokens of the engine's own KV "
        "cache",
        ratio * engine_tokens,
        ratio,
        engine_tokens,
    )
    if ratio < 1:
        logger.warning(
            "kv-offload: host memory is smaller than the engine's own KV cache, so most of what it "
            "keeps is there anyway, and few prompts will hit. Give cpu_bytes %.3g times as much or "
            "more, or run without kv-offload",
            1 / ratio,
        )
