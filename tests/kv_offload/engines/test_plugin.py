from __future__ import annotations

import logging
import sys

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

import kv_offload.engines.vllm.connector  # noqa: F401 - vLLM takes our messages from then on
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.plugin import VLLM_LOG, register
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, WorkerCapacity


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    names = {name: cls for name, cls in KVConnectorFactory._registry.items() if name != CONNECTOR}
    monkeypatch.setattr(KVConnectorFactory, "_registry", names)
    return names


def test_the_connector_is_registered_once_and_nothing_else_is_touched(registry):
    """vLLM calls the entry point in each of its processes, and may do so more than once."""
    before = dict(registry)
    register()
    after = dict(registry)
    register()
    assert registry == after, "the same loader"
    assert after.pop(CONNECTOR)
    assert after == before
    config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    found = KVConnectorFactory.get_connector_class(config)
    assert f"{found.__module__}.{found.__name__}" == (
        "kv_offload.engines.vllm.connector.KVOffloadConnector"
    )


def test_a_vllm_of_another_shape_goes_on_without_the_plugin(monkeypatch, caplog):
    """vLLM calls the entry point for every engine, and an error would end those without us, too."""
    monkeypatch.setitem(sys.modules, KVConnectorFactory.__module__, None)  # importing it raises
    with pytest.raises(ImportError):
        register()
    monkeypatch.setattr("vllm.__version__", "0.40.1")
    monkeypatch.setattr(VLLM_LOG, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    (told,) = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert told[0] == "ERROR"
    assert told[1].startswith("kv-offload: works with vLLM 0.31 to 0.33, this is '0.40.1'; ")


@pytest.mark.parametrize("name", ["kv_offload", "kv_swap"])
def test_both_logs_go_to_vllms(monkeypatch, caplog, name):
    assert VLLM_LOG.name.startswith("vllm.")
    shown: list[str] = []
    monkeypatch.setattr(VLLM_LOG, "handle", lambda r: shown.append(r.getMessage()))
    monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    for _ in range(2):
        register()
    caplog.set_level(logging.INFO, VLLM_LOG.name)
    logging.getLogger(f"{name}.some.module").info("page-locked %d bytes", 5)
    logging.getLogger(f"{name}.some.module").debug("not asked for")
    assert shown == ["kv-offload: page-locked 5 bytes"]
    caplog.set_level(logging.ERROR, VLLM_LOG.name)
    logging.getLogger(name).info("not of interest to this user")
    logging.getLogger(name).error("kv-offload: of %s", "interest")
    assert shown == ["kv-offload: page-locked 5 bytes", "kv-offload: of interest"]


def test_messages_are_what_vllm_expects_of_a_connector():
    assert issubclass(OffloadMetadata, KVConnectorMetadata)
    assert issubclass(OffloadWorkerMetadata, KVConnectorWorkerMetadata)
    assert issubclass(WorkerCapacity, KVConnectorHandshakeMetadata)
