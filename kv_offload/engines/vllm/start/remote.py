"""Builds the parts of an engine that need a remote store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kv_offload.config import OffloadConfig, RemoteConfig
from kv_offload.engines.vllm.start.contents import check_contents, describe_contents
from kv_offload.tiers.directory import RemoteDirectory
from kv_offload.tiers.lower import TierSpec
from kv_offload.tiers.remote import RemoteTier
from kv_offload.worker.remote import Remote, check_usable, make_client

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def find_remote(
    config: OffloadConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> Remote | None:
    """Return the store that the configuration names; None without one.

    Raises `ConfigError` as `check_remote` does.
    """
    check_remote(config, vllm_config)
    if config.remote is None:
        return None
    contents = describe_contents(vllm_config, kv_cache_config)
    return Remote(config.remote, contents)


def check_remote(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` if other engines could not know what the keys of blocks mean.

    Also raises it as `check_usable` does.
    """
    if config.remote is not None:
        check_contents(vllm_config, "remote", keep_on_reset=config.remote.keep_on_reset)
        check_usable(config.remote)


def remote_tier(config: RemoteConfig, num_ranks: int) -> TierSpec:
    """Return the specification of the remote tier."""

    def open_directory(prefixes: Sequence[str]) -> RemoteDirectory:
        from kv_swap.tiers.remote.keys import object_keys

        return RemoteDirectory(make_client(config, 0), prefixes, object_keys)

    return TierSpec(
        make=partial(RemoteTier, open_directory),
        write_rate=config.write_rate / num_ranks,
        keep_on_reset=config.keep_on_reset,
    )
