"""What the start says in the log."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kv_offload.engines.vllm.start.log import FIRST_REQUESTS, MissedRequests
from tests.support.configurations import make_kv_cache_config, make_vllm_config
from tests.support.played_cases import FULL
from tests.support.played_engine import PlayedEngine


@pytest.fixture(scope="module")
def front_end() -> Any:
    config = make_vllm_config({"cpu_bytes": "16384kib"})
    config.cache_config.block_size = 4
    return config


def created(config: Any, caplog: pytest.LogCaptureFixture) -> tuple[Any, dict[str, list[str]]]:
    caplog.set_level(logging.INFO, "kv_offload")
    cache = make_kv_cache_config((FULL,), 40)
    halves = [KVConnectorFactory.create_connector(config, role, cache) for role in KVConnectorRole]
    lines = {
        name: [r.getMessage() for r in caplog.records if r.levelname == name and "kv_o" in r.name]
        for name in ("WARNING", "INFO")
    }
    return halves[0], lines


def test_the_start_says_how_it_is_configured_and_what_it_does_not_read(
    front_end, monkeypatch, caplog
):
    config = copy.deepcopy(front_end)
    config.kv_transfer_config.kv_connector_extra_config["on_load_failure"] = "fail"
    monkeypatch.setenv("KV_OFFLOAD_CONFIG", "/srv/kv.yaml")
    _, lines = created(config, caplog)
    (warning,) = lines["WARNING"]
    assert warning.startswith("kv-offload: environment: KV_OFFLOAD_CONFIG is not read: ")
    written = "kv-offload: configured by cpu_bytes=16384kib, on_load_failure=fail"
    assert lines["INFO"] == [written], "the rank does not say it again"


def test_a_line_of_the_start_is_short_whatever_is_configured(front_end, tmp_path, caplog):
    file = tmp_path / ("long" * 30) / "kv.yaml"
    file.parent.mkdir()
    file.write_text(f"cpu_bytes: 16MiB\nrecord_trace: {tmp_path}/trace\neviction_policy: lru\n")
    config = copy.deepcopy(front_end)
    config.kv_transfer_config.kv_connector_extra_config = {"config_file": str(file)}
    _, lines = created(config, caplog)
    assert all(len(line) <= 200 for line in lines["INFO"])
    assert lines["INFO"][0].startswith("kv-offload: configured by ")


def test_a_thousand_requests_without_a_hit_are_said_once_with_the_page(caplog):
    missed = MissedRequests()
    for _ in range(FIRST_REQUESTS - 1):
        missed.ended()
    assert not caplog.records
    for _ in range(FIRST_REQUESTS):
        missed.ended()
    (line,) = [record.getMessage() for record in caplog.records]
    file, _, anchor = line.partition("The reasons: ")[2].partition("#")
    page = Path(__file__).parents[3] / file
    assert f"## {anchor.replace('-', ' ').capitalize()}" in page.read_text()


def test_requests_without_a_hit_are_counted_until_the_first_hit():
    engine = PlayedEngine()
    prompt = list(range(3, 24))
    engine.serve("first", prompt)
    assert engine.connector._missed_requests is not None
    assert engine.pool.reset_prefix_cache()
    engine.serve("again", prompt)
    assert engine.totals["hit_tokens"]
    assert engine.connector._missed_requests is None
    engine.serve("third", prompt)
