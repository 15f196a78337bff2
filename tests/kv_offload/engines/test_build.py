"""What building the scheduler's half says in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.support.configurations import make_kv_cache_config, make_vllm_config
from tests.support.played_cases import FULL

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def front_end() -> Any:
    """What the front end has made of its arguments, in which vLLM has loaded its plugins."""
    config = make_vllm_config({"cpu_bytes": "16384kib"})
    config.cache_config.block_size = 4
    return config


@pytest.fixture
def logged(front_end: Any, caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The level and the text of our lines of a start with a variable that is not read."""
    caplog.set_level(logging.INFO, "kv_offload")
    cache = make_kv_cache_config((FULL,), 40)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KV_OFFLOAD_CONFIG", "/srv/kv.yaml")
        KVConnectorFactory.create_connector(front_end, KVConnectorRole.SCHEDULER, cache)
    ours = [record for record in caplog.records if record.name.startswith("kv_offload.")]
    return [(record.levelname, record.getMessage()) for record in ours]


def test_the_configuration_is_shown_as_it_was_written(logged: list[tuple[str, str]]) -> None:
    (line,) = [text for level, text in logged if level == "INFO" and "cpu_bytes=" in text]
    assert line.startswith("kv-offload: cpu_bytes=16384kib (16 MiB), eviction_policy=lru, ")


def test_a_variable_that_is_not_read_is_a_warning(logged: list[tuple[str, str]]) -> None:
    (warning,) = [text for level, text in logged if level == "WARNING"]
    assert warning.startswith("kv-offload: environment: KV_OFFLOAD_CONFIG is not read: ")
