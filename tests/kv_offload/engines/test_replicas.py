"""How many replicas a process of a replica sees, in configurations that vLLM makes."""

from __future__ import annotations

import copy
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kv_offload.cache.prefix import CacheGroup
from kv_offload.config.host_memory import HostMemory, read_host_memory
from kv_offload.engines.vllm.connector import KVOffloadConnector
from kv_offload.engines.vllm.plugin import register
from kv_offload.engines.vllm.start.ranks import LocalReplicas, count_local_replicas
from kv_offload.errors import CapacityError
from tests.support.configurations import PAGE_WORDS, make_kv_cache_config, make_vllm_config

REPLICAS = 8
BLOCK_BYTES = PAGE_WORDS * 8


@pytest.fixture(scope="module")
def front_end() -> Any:
    """What the front end of 8 replicas on this host has made of its arguments."""
    register()
    return make_vllm_config({"cpu_bytes": "25%"}, replicas=REPLICAS)


def start_replica(front_end: Any, rank: int, *, dense: bool = True) -> Any:
    """Return what a replica's process has: what `EngineCoreProc.run_engine_core` makes of it."""
    config = pickle.loads(pickle.dumps(front_end))
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    transfer.engine_id = f"{transfer.engine_id}_dp{rank}"
    parallel.data_parallel_rank_local = parallel.data_parallel_index = rank
    if not dense:
        parallel.data_parallel_rank = rank
    else:
        parallel.reconfigure_for_independent_dp_rank()
    return config


@pytest.mark.parametrize("dense", [True, False])
def test_every_replica_sees_all_of_its_host(front_end, dense):
    for rank in range(REPLICAS):
        config = start_replica(front_end, rank, dense=dense)
        assert (config.parallel_config.data_parallel_size_local == 1) == dense
        assert count_local_replicas(config, {}) == LocalReplicas(REPLICAS)


def test_a_dense_replica_whose_front_end_noted_nothing_says_so(front_end):
    bare = copy.deepcopy(front_end)
    del bare.parallel_config._kv_offload_local_replicas
    found = count_local_replicas(start_replica(bare, 3), {})
    assert found == LocalReplicas(1, hidden=True)
    assert count_local_replicas(make_vllm_config({}), {}) == LocalReplicas(1), "alone"


@pytest.mark.parametrize(
    "words", [["--data-parallel-size-local", "4"], ["--data_parallel_size_local=4"], ["-dpl", "4"]]
)
@pytest.mark.parametrize("supervised", [True, False])
def test_a_server_of_a_supervisor_sees_all_of_its_host(words, supervised, monkeypatch):
    """It has the command line of the one that started it, and is told that it has one replica."""
    register()
    supervisor = ["--data-parallel-multi-port-external-lb"] if supervised else []
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", *supervisor, *words])
    config = make_vllm_config({"cpu_bytes": "25%"})
    for name, value in {**HOSTS, **SUPERVISED}.items():
        setattr(config.parallel_config, name, value)
    replica = start_replica(config, 3, dense=False)
    expected = LocalReplicas(4) if supervised else LocalReplicas(1, hidden=True)
    assert count_local_replicas(replica, {}) == expected


SUPERVISED = {"data_parallel_size": 8, "data_parallel_external_lb": True}
HOSTS = {"data_parallel_master_ip": "10.0.0.7"}
LOCAL = {"data_parallel_master_ip": "127.0.0.1"}
STARTED_ALONE = {"VLLM_DP_SIZE": "8"}


@pytest.mark.parametrize(
    ("parallel", "environ", "found"),
    [
        # Load balancing by vLLM, over hosts that have four replicas each, or one each.
        ({**HOSTS, "data_parallel_size_local": 4}, {}, LocalReplicas(4)),
        (HOSTS, {}, LocalReplicas(1)),
        # Each process is started by itself, with load balancing by others or without any.
        ({**HOSTS, "data_parallel_external_lb": True}, {}, LocalReplicas(1, hidden=True)),
        (HOSTS, STARTED_ALONE, LocalReplicas(1, hidden=True)),
        # All of them meet where nobody from another host can.
        ({**LOCAL, "data_parallel_external_lb": True}, {}, LocalReplicas(8)),
        ({"data_parallel_master_ip": "localhost"}, STARTED_ALONE, LocalReplicas(8)),
        ({"data_parallel_master_ip": "::1"}, STARTED_ALONE, LocalReplicas(8)),
    ],
)
def test_replicas_of_a_mixture_of_experts(parallel, environ, found):
    defaults = {
        "data_parallel_size": 8,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": False,
    }
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**defaults | parallel),
        kv_transfer_config=SimpleNamespace(engine_id="x_dp0"),
    )
    assert count_local_replicas(config, environ) == found


def build_rank(config: Any) -> KVOffloadConnector:
    cache = make_kv_cache_config([CacheGroup(0, 4)], 8)
    return KVOffloadConnector(config, KVConnectorRole.WORKER, cache)


def test_the_connectors_of_eight_replicas_divide_a_quarter_of_the_host(front_end):
    share_bytes = read_host_memory().size_bytes // REPLICAS // 4
    made = [build_rank(start_replica(front_end, rank)) for rank in range(REPLICAS)]
    for replica in made:
        replica.register_kv_caches({"layer.0": torch.zeros(8, 4, PAGE_WORDS // 4).long()})
        assert replica.get_handshake_metadata().num_slots == share_bytes // BLOCK_BYTES
    for replica in made:
        replica.shutdown()


def test_a_rank_is_refused_what_is_not_available(front_end, monkeypatch):
    config = start_replica(front_end, 0)
    build_rank(config)
    monkeypatch.setattr(
        "kv_offload.worker.capacity.read_available_memory",
        lambda: HostMemory(1 << 20, "a played host"),
    )
    with pytest.raises(CapacityError, match=r"1 MiB .* are available now \(a played host\)"):
        build_rank(config)
