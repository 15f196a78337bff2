"""What an engine with a disk is built with, and what is refused at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload.cache.prefix import CacheGroup
from kv_offload.config import DiskConfig, OffloadConfig
from kv_offload.engines.vllm.start.tiers import disk_tier, find_tiers
from kv_offload.errors import CapacityError, ConfigError
from kv_offload.worker.disk import Disk
from tests.support.configurations import make_kv_cache_config, make_vllm_config

pytestmark = pytest.mark.engine

DISK = DiskConfig(path="/nowhere", bytes=1)
KV_CACHE = make_kv_cache_config([CacheGroup(0, 4)], 8)


def find(folder: Path, *, engine: dict[str, Any] | None = None, **options: Any) -> Disk:
    vllm_config = make_vllm_config({"cpu_bytes": "1MiB"})
    for name, value in (engine or {}).items():
        part, _, name = name.rpartition(".")
        setattr(getattr(vllm_config, part) if part else vllm_config, name, value)
    disk_config = DiskConfig(path=str(folder), bytes=1 << 20, **options)
    config = OffloadConfig(cpu_bytes=1, disk=disk_config)
    disk, *_ = find_tiers(config, vllm_config, KV_CACHE)
    assert disk is not None
    return disk


def test_the_folder_is_made_for_its_user_alone(tmp_path):
    disk = find(tmp_path / "kv")
    assert disk.folder == tmp_path / "kv"
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    assert disk.nbytes == 1 << 20


def test_a_later_replica_has_a_folder_of_its_own(tmp_path):
    disk = find(tmp_path / "kv", engine={"parallel_config.data_parallel_index": 2})
    assert disk.folder == tmp_path / "kv" / "replica-2"
    for made in (disk.folder, disk.folder.parent):  # it may come before the first replica
        assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("replica", [0, 2])
def test_no_replica_makes_the_place_of_a_disk_that_is_not_mounted(replica, tmp_path):
    with pytest.raises(ConfigError, match=r"disk\.path.*cannot be created.*Create it for the user"):
        find(tmp_path / "nvme" / "kv", engine={"parallel_config.data_parallel_index": replica})
    assert not (tmp_path / "nvme").exists()


def test_two_starts_mean_the_same_only_if_a_restart_is_to_be_served(tmp_path):
    assert find(tmp_path).contents == find(tmp_path).contents
    once = [find(tmp_path, keep_on_restart=False).contents for _ in range(2)]
    assert once[0] != once[1]


def test_with_lora_no_other_process_is_served(tmp_path):
    engine = {"lora_config": SimpleNamespace()}
    assert find(tmp_path, engine=engine).contents != find(tmp_path, engine=engine).contents
    with pytest.raises(ConfigError, match=r"disk\.keep_on_reset: true.*LoRA.*remove the key"):
        find(tmp_path, engine=engine, keep_on_reset=True)


def test_hashes_that_another_process_draws_anew_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "kv_offload.engines.vllm.model.namespace.reproducible_hashes", lambda _: "so it is"
    )
    with pytest.raises(
        ConfigError, match=r"useless to any other process: so it is.*keep_on_restart: false"
    ):
        find(tmp_path)
    assert find(tmp_path, keep_on_restart=False)


def test_ranks_divide_the_disk_and_share_as_they_share_memory(tmp_path):
    disk = Disk(tmp_path, 100 << 20, {})
    slots = {
        (ranks, sharing): disk_tier(DISK, disk, 4096, ranks, sharing).make().manager.num_slots
        for ranks, sharing in ((1, 1), (4, 1), (4, 4))
    }
    one = (100 << 20) // 8192
    assert slots[1, 1] == pytest.approx(one, abs=10)
    assert slots[4, 1] == pytest.approx(one / 4, abs=10)
    assert slots[4, 4] == pytest.approx(one, abs=40)


def test_a_disk_without_room_for_a_slot_is_refused(tmp_path):
    with pytest.raises(CapacityError, match=r"disk\.bytes gives each of 2 ranks.*one slot takes"):
        disk_tier(DISK, Disk(tmp_path, 100 << 10, {}), 4096, 2, 1)
