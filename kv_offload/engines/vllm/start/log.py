"""Log lines of the start: the configuration, its effects on others, the pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

from kv_offload.config import TracedConfig
from kv_offload.engines.vllm.start import members
from kv_offload.engines.vllm.versions import role_accepts_embeddings
from kv_offload.worker.capacity import describe_share, warn_of_hidden_replicas

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def log_warnings(
    traced: TracedConfig, vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]
) -> None:
    """Warn of what in the user's settings is not read, or changes more than the plugin."""
    warnings = [*traced.warnings, *members.unread(vllm_config, enclosing)]
    engine_config = members.engine_transfer(vllm_config, enclosing)
    if role_accepts_embeddings(vllm_config, engine_config):
        warnings.append(
            f"kv_role is {engine_config.kv_role!r}, with which vLLM accepts embeddings in place of "
            "images and other inputs (enable_mm_embeds), even without their data "
            "(allow_missing_mm_embeddings), which it reserves for trusted users: set kv_role to "
            "'kv_producer', unless another engine sends KV to this one"
        )
    for warning in warnings:
        logger.warning("kv-offload: %s", warning)


def log_configuration(traced: TracedConfig, *, hidden_replicas: bool) -> None:
    """Log the effective configuration, and what becomes of it on this host."""
    policy = traced.config.on_load_failure
    done = "computed again" if policy == "recompute" else "failed"
    failed_loads = (
        f"a request whose load fails is {done} (on_load_failure: {policy}); vLLM's own "
        "kv_load_failure_policy is for loads of other connectors"
    )
    for line in (traced.describe(), failed_loads, describe_share(traced)):
        logger.info("kv-offload: %s", line)
    if hidden_replicas:
        warn_of_hidden_replicas(traced)


def log_pool(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, num_slots: int) -> None:
    """Log what the pool holds in tokens and beside the engine's own cache; warn if it is smaller.

    Tokens are those of vLLM's line `KV cache size`: of requests of the model's full length.
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
