"""Builds the parts of an engine that need a host pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_offload.config import OffloadConfig
from kv_offload.engines.vllm.start.tiers import check_contents, describe_contents
from kv_offload.worker.pool import Pool, check_pool_folder, pool_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def find_pool(
    config: OffloadConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> Pool | None:
    """Return the pool that the configuration names; None without one.

    Raises `ConfigError` as `check_pool` does.
    """
    check_pool(config, vllm_config)
    if config.host_pool is None:
        return None
    return Pool(pool_folder(config), describe_contents(vllm_config, kv_cache_config))


def check_pool(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` if another process could not know what the keys of blocks mean.

    Also raises it if the folder of the pools is missing, is not writable, or is not in memory.
    """
    if config.host_pool is None:
        return
    check_contents(vllm_config, "host_pool", keep_on_reset=False)
    check_pool_folder(config.host_pool_path)
