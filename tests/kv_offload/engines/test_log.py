"""What the start says in the log."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.support.configurations import make_kv_cache_config, make_vllm_config
from tests.support.played_cases import FULL


@pytest.fixture(scope="module")
def front_end() -> Any:
    """What the front end has made of its arguments, in which vLLM has loaded its plugins."""
    config = make_vllm_config({"cpu_bytes": "16384kib"})
    config.cache_config.block_size = 4
    return config


@pytest.mark.parametrize(("policy", "done"), [("recompute", "computed again"), ("fail", "failed")])
def test_the_start_says_how_it_is_configured_and_what_it_does_not_read(
    front_end, policy, done, monkeypatch, caplog
):
    config = copy.deepcopy(front_end)
    config.kv_transfer_config.kv_connector_extra_config["on_load_failure"] = policy
    caplog.set_level(logging.INFO, "kv_offload")
    monkeypatch.setenv("KV_OFFLOAD_CONFIG", "/srv/kv.yaml")
    cache = make_kv_cache_config((FULL,), 40)
    for role in KVConnectorRole:
        KVConnectorFactory.create_connector(config, role, cache)
    lines = {
        name: [r.getMessage() for r in caplog.records if r.levelname == name and "kv_o" in r.name]
        for name in ("WARNING", "INFO")
    }
    (warning,) = lines["WARNING"]
    assert warning.startswith("kv-offload: environment: KV_OFFLOAD_CONFIG is not read: ")
    written, failures, memory, *_ = lines["INFO"]
    assert written.startswith("kv-offload: cpu_bytes=16384kib (16 MiB), eviction_policy=auto, ")
    assert failures == (
        f"kv-offload: a request whose load fails is {done} (on_load_failure: {policy}); vLLM's own "
        "kv_load_failure_policy is for loads of other connectors"
    )
    assert memory.startswith("kv-offload: takes 16 MiB of host memory, ")
    assert len({*lines["INFO"]}) == len(lines["INFO"]), "the rank does not say it again"
