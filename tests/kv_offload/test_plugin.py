from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kv_offload.engines.vllm.plugin import CONNECTOR, register


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A copy of vLLM's registry without our connector."""
    names = {name: cls for name, cls in KVConnectorFactory._registry.items() if name != CONNECTOR}
    monkeypatch.setattr(KVConnectorFactory, "_registry", names)
    return names


def test_the_connector_is_registered_under_the_name_of_its_class() -> None:
    register()
    found = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    assert found.__name__ == CONNECTOR == "KVOffloadConnector"
    assert found.__module__ == "kv_offload.engines.vllm.connector"


def test_a_second_call_changes_nothing(registry: dict[str, object]) -> None:
    """vLLM calls the entry point in each of its processes, and may do so more than once."""
    register()
    loader = registry[CONNECTOR]
    register()
    assert registry[CONNECTOR] is loader


def test_nothing_else_is_touched(registry: dict[str, object]) -> None:
    before = dict(registry)
    register()
    assert {name: cls for name, cls in registry.items() if name != CONNECTOR} == before


def test_a_users_configuration_finds_it() -> None:
    register()
    config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config).__name__ == CONNECTOR
