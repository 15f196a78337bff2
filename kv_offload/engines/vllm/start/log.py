"""Logs the configuration, its side effects and the pool at start, and later a lack of hits."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

from kv_offload.config import ResolvedConfig
from kv_offload.engines.vllm.start import members
from kv_offload.engines.vllm.versions import role_accepts_embeddings
from kv_offload.worker.capacity import describe_share, warn_of_hidden_replicas

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from kv_offload.engines.vllm.start.build import Engine

logger = logging.getLogger(__name__)

LINE_LETTERS = 180
"""Maximum length of a log line in characters, without `kv-offload: `."""

FIRST_REQUESTS = 1000
"""Number of requests that end without any hit before a warning is logged."""


def log_warnings(
    traced: ResolvedConfig, vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]
) -> None:
    """Warn about the user's settings that are ignored or that affect more than the plugin."""
    warnings = [*traced.warnings, *members.unread(vllm_config, enclosing)]
    engine_config = members.engine_transfer(vllm_config, enclosing)
    if role_accepts_embeddings(vllm_config, engine_config):
        warnings.append(
            f"kv_role {engine_config.kv_role!r} makes vLLM accept embeddings in place of images "
            "(enable_mm_embeds), for trusted users only: set 'kv_producer', unless another engine "
            "sends KV to this one"
        )
    for warning in warnings:
        logger.warning("kv-offload: %s", warning)


def log_configuration(traced: ResolvedConfig, *, hidden_replicas: bool) -> None:
    """Log the user's settings in one line, and the whole configuration at debug level."""
    logger.info("kv-offload: %s", textwrap.shorten(traced.describe_given(), LINE_LETTERS))
    logger.debug("kv-offload: %s", traced.describe())
    if hidden_replicas:
        warn_of_hidden_replicas(traced)


def log_pool(engine: Engine, num_slots: int) -> None:
    """Log the pool's share of host memory and its tokens; warn if the engine's own cache has more.

    Tokens are counted as in vLLM's line `KV cache size`: for requests of the model's full length.
    """
    vllm_config, kv_cache = engine.vllm_config, engine.kv_cache_config
    requests = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache)
    engine_tokens = int(requests * vllm_config.model_config.max_model_len)
    ratio = num_slots / kv_cache.num_blocks
    logger.info(
        "kv-offload: host memory holds %d tokens, %.3g times the engine's own KV cache, and %s",
        ratio * engine_tokens,
        ratio,
        describe_share(engine.traced),
    )
    if ratio < 1:
        logger.warning(
            "kv-offload: host memory is smaller than the engine's own KV cache, so few prompts "
            "hit. Give cpu_bytes %.3g times as much or more, or run without kv-offload",
            1 / ratio,
        )


class MissedRequests:
    """Counts requests without a hit, and logs once if there are many, with possible reasons."""

    def __init__(self) -> None:
        self._requests = 0

    def ended(self) -> None:
        """Count a request that ended."""
        self._requests += 1
        if self._requests == FIRST_REQUESTS:
            logger.warning(
                "kv-offload: none of the first %d requests had a hit in host memory. The reasons: "
                "docs/use/troubleshooting.md#nothing-is-loaded",
                FIRST_REQUESTS,
            )
