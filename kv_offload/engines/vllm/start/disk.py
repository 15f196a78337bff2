"""Builds the parts of an engine that need a disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.config import DiskConfig, OffloadConfig
from kv_offload.config.checks import find_place, unusable_folder
from kv_offload.config.disk_folder import INDEX_FILE, replica_folder
from kv_offload.engines.vllm.start.contents import PROCESS, check_contents, describe_contents
from kv_offload.tiers.disk import DiskTier
from kv_offload.tiers.lower import TierSpec
from kv_offload.worker.disk import Disk

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def find_disk(
    config: OffloadConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> Disk | None:
    """Return the disk that the configuration gives this replica, with its folder; None without one.

    Raises `ConfigError` as `check_disk` and `make_folder` do.
    """
    check_disk(config, vllm_config)
    folder = make_folder(config, vllm_config)
    if folder is None or config.disk is None:
        return None
    private = not config.disk.keep_on_restart
    contents = describe_contents(vllm_config, kv_cache_config, private=private)
    return Disk(folder, config.disk.bytes, contents)


def check_disk(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` for an unusable folder, or for block keys that no other process knows."""
    if config.disk is None:
        return
    find_place(Path(config.disk.path))
    check_contents(
        vllm_config,
        "disk",
        private=not config.disk.keep_on_restart,
        keep_on_reset=config.disk.keep_on_reset,
        remedy=". Or set disk: {keep_on_restart: false}, to use the disk for this process alone",
    )


def make_folder(config: OffloadConfig, vllm_config: VllmConfig) -> Path | None:
    """Create the folder of this replica and return it; None without a disk.

    Raises `ConfigError` if it cannot be created or written.
    """
    if config.disk is None:
        return None
    path = Path(config.disk.path)
    folder = replica_folder(path, replica_index(vllm_config))
    try:
        # KV reveals the prompts of users, so no other user may enter.
        path.mkdir(0o700, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)
    except OSError as error:
        raise unusable_folder(path, error) from error
    return folder


def replica_index(vllm_config: VllmConfig) -> int:
    """Return the index of this data-parallel replica; each replica has a separate folder."""
    parallel = vllm_config.parallel_config
    # Replicas of a dense model do not see each other; only this index tells them apart.
    return int(parallel.data_parallel_index)


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
