"""What depends on vLLM's version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm

from kv_offload.engines.vllm.versions import (
    NEWEST,
    OLDEST,
    bytes_per_block,
    check_version,
    host_hit_source,
    vllm_version,
)
from kv_offload.errors import UnsupportedError


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.31", (0, 31)),
        ("0.31.1.dev7+g1234abc.d20260101", (0, 31)),
        ("0.32.0+cpu", (0, 32)),
        ("0.33.12rc1", (0, 33)),
    ],
)
def test_versions_that_are_supported(version, expected):
    assert check_version(version) == expected
    assert OLDEST <= vllm_version() <= NEWEST


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "1.32.0", "", "dev", "v0.32.0", "0.-32"])
def test_versions_that_are_refused(version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedError) as caught:
        vllm_version()
    message = str(caught.value)
    assert "0.31 to 0.33" in message
    assert repr(version) in message
    assert "install a vLLM in that range" in message


def test_the_label_for_hits_in_host_memory_exists_where_the_engine_has_labels():
    source = host_hit_source()
    assert (source is not None) == hasattr(
        vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1,
        "get_external_cache_hit_sources",
    )


def test_bytes_of_a_block_are_those_of_the_one_allocation():
    tensors = [SimpleNamespace(size=1009, layers=["a"], layer_stride=1, block_stride=2)] * 3
    assert bytes_per_block(SimpleNamespace(num_blocks=10, kv_cache_tensors=tensors)) == 100
