"""Checks and builds an engine's host pool, disk and remote store."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.config import DiskConfig, OffloadConfig, RemoteConfig
from kv_offload.config.checks import find_place, unusable_folder
from kv_offload.config.disk_folder import INDEX_FILE, replica_folder
from kv_offload.engines.vllm.model import namespace
from kv_offload.errors import ConfigError, Problems
from kv_offload.tiers.directory import RemoteDirectory
from kv_offload.tiers.disk import DiskTier
from kv_offload.tiers.lower import TierSpec
from kv_offload.tiers.remote import RemoteTier
from kv_offload.worker.disk import Disk
from kv_offload.worker.pool import Pool, check_pool_folder, pool_folder
from kv_offload.worker.remote import Remote, check_usable, make_client

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PROCESS = "process"
"""Key of a description's value that no other process has."""


def check_tiers(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Raise one error for all tiers that are unusable, or whose contents others could not use."""
    problems = Problems()
    if config.disk is not None:
        with problems:
            find_place(Path(config.disk.path))
            check_contents(
                vllm_config,
                "disk",
                private=not config.disk.keep_on_restart,
                keep_on_reset=config.disk.keep_on_reset,
                remedy=". Or set disk: {keep_on_restart: false}, to use the disk for this process "
                "alone",
            )
    if config.remote is not None:
        with problems:
            check_contents(vllm_config, "remote", keep_on_reset=config.remote.keep_on_reset)
            check_usable(config.remote)
    if config.host_pool is not None:
        with problems:
            check_contents(vllm_config, "host_pool", keep_on_reset=False)
            check_pool_folder(config.host_pool_path)
    problems.raise_all()


def find_tiers(
    config: OffloadConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[Disk | None, Remote | None, Pool | None]:
    """Return this replica's disk, remote store and host pool; creates the disk's folder.

    Raises `ConfigError` as `check_tiers` and `make_folder` do.
    """
    check_tiers(config, vllm_config)
    disk = remote = pool = None
    if config.disk is not None:
        folder = make_folder(config.disk, vllm_config)
        private = not config.disk.keep_on_restart
        contents = describe_contents(vllm_config, kv_cache_config, private=private)
        disk = Disk(folder, config.disk.bytes, contents)
    if config.remote is not None:
        remote = Remote(config.remote, describe_contents(vllm_config, kv_cache_config))
    if config.host_pool is not None:
        pool = Pool(pool_folder(config), describe_contents(vllm_config, kv_cache_config))
    return disk, remote, pool


def check_contents(
    vllm_config: VllmConfig,
    key: str,
    *,
    private: bool = False,
    keep_on_reset: bool,
    remedy: str = "",
) -> None:
    """Raise `ConfigError` if another process could misread the tier's blocks, or never find them.

    `key` is the tier's section of the configuration, `keep_on_reset` its value there, and `remedy`
    an alternative to offer. `private` blocks, and those of an engine with LoRA, are not shared.
    """
    has_lora = vllm_config.lora_config is not None
    is_shared = not private and not has_lora
    if is_shared and (problem := namespace.reproducible_hashes(vllm_config)):
        raise ConfigError(
            f"{key}: blocks kept there would be useless to any other process: {problem}{remedy}"
        )
    if has_lora and keep_on_reset:
        raise ConfigError(
            f"{key}.keep_on_reset: true: an engine with LoRA must drop the blocks of an "
            "adapter that was replaced under its name, and does so by a reset: remove the key"
        )


def describe_contents(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, private: bool = False
) -> dict[str, str]:
    """Return, by name, everything that must be equal for another process's block to be usable here.

    With `private` or LoRA, no other process has an equal description.
    """
    contents = namespace.describe(vllm_config, kv_cache_config)
    if private or vllm_config.lora_config is not None:
        # An adapter's files may change under its name, and a key includes only the name.
        contents[PROCESS] = secrets.token_hex(16)
    return contents


def make_folder(config: DiskConfig, vllm_config: VllmConfig) -> Path:
    """Create the folder of this replica and return it. Raises `ConfigError` if that fails."""
    path = Path(config.path)
    folder = replica_folder(path, replica_index(vllm_config))
    try:
        # KV reveals users' prompts, so no other user of the host may enter.
        path.mkdir(0o700, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)
    except OSError as error:
        raise unusable_folder(path, error) from error
    return folder


def replica_index(vllm_config: VllmConfig) -> int:
    """Return the index of this data-parallel replica; each replica has a separate folder."""
    # Replicas of a dense model do not see each other and differ only in this index.
    return int(vllm_config.parallel_config.data_parallel_index)


def recording_file(config: OffloadConfig, vllm_config: VllmConfig) -> Path | None:
    """Return the file to which this replica records its requests; None without `record_trace`.

    The second replica's file ends in `.replica-1`, and so on.
    """
    if config.record_trace is None:
        return None
    replica = replica_index(vllm_config)
    return Path(config.record_trace + (f".replica-{replica}" if replica else ""))


def disk_tier(
    config: DiskConfig, disk: Disk, slot_bytes: int, num_ranks: int, sharing_ranks: int
) -> TierSpec:
    """Return the specification of the disk tier."""
    num_slots = disk.file_slots(num_ranks, slot_bytes) * sharing_ranks
    open_index = partial(DiskIndex, disk.folder / INDEX_FILE, disk.contents)
    return TierSpec(
        make=partial(DiskTier, num_slots, open_index, outlives=PROCESS not in disk.contents),
        write_rate=config.write_rate / num_ranks,
        keep_on_reset=config.keep_on_reset,
    )


def remote_tier(config: RemoteConfig, num_ranks: int) -> TierSpec:
    """Return the specification of the remote tier."""

    def open_directory(prefixes: Sequence[str]) -> RemoteDirectory:
        from kv_swap.tiers.remote.client import object_keys

        return RemoteDirectory(make_client(config, 0), prefixes, object_keys)

    return TierSpec(
        make=partial(RemoteTier, open_directory),
        write_rate=config.write_rate / num_ranks,
        keep_on_reset=config.keep_on_reset,
    )
