"""Which order of the KV cache the connector asks for, through vLLM's own resolution."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from kv_offload.engines.vllm.connector import KVOffloadConnector
from tests.support.configurations import make_vllm_config

ALL = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
"""The layouts of backends that declare none, in vLLM's order."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, 9)


def play(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda platform: True)
    monkeypatch.setattr(
        type(current_platform),
        "get_device_capability",
        classmethod(lambda cls, device_id=0: DeviceCapability(major, 0)),
    )


def make(change: Callable[[Any], None] = lambda config: None, **options: Any) -> Any:
    config = make_vllm_config({}, **options)
    config.cache_config.user_specified_block_size = False  # the support sets one
    config.attention_config.backend = None
    change(config)
    return config


def resolved(config: Any, supported: list[str] = ALL) -> str:
    return str(resolve_kv_cache_layout(config, [supported]).name)


@pytest.mark.usefixtures("hopper")
def test_blocks_are_outermost_where_vllm_can_have_it(monkeypatch):
    assert resolved(make()) == "BLNHC"
    assert resolved(make(), ["LBNHC", "LBHNC"]) == "LBNHC", "a backend that lacks it starts, too"
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert resolved(make()) == "LBHNC", "the user's choice goes before"


def with_backend(name: str) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.attention_config.backend = AttentionBackendEnum[name]

    return change


def with_text(**names: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in names.items():
            setattr(config.model_config.hf_text_config, name, value)

    return change


def with_block_size(tokens: int, head_size: int = 128) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.cache_config.user_specified_block_size = True
        config.cache_config.block_size = tokens
        config.model_config.get_head_size = lambda: head_size

    return change


def with_packed_cache(config: Any) -> None:
    config.cache_config.cache_dtype = "fp8"


def with_states(config: Any) -> None:
    config.model_config.hf_config.layer_types = ["mamba"] * 2
    config.model_config._model_info = SimpleNamespace(
        **{**vars(config.model_config._model_info), "is_hybrid": True}
    )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "asked"),
    [
        (with_backend("FLASH_ATTN"), True),
        (with_backend("TRITON_ATTN"), True),
        (with_backend("FLASHINFER"), False),
        (with_text(layer_types=["full_attention"] * 2), True),
        (with_text(layer_types=["full_attention", "sliding_attention"]), False),
        (with_text(attention_chunk_size=8192), False),
        (with_block_size(16), True),
        (with_block_size(64), True),
        (with_block_size(8), False),
        (with_block_size(16, head_size=256), False),
        (with_packed_cache, False),
        (with_states, False),
    ],
)
def test_only_the_simple_case_asks(change, asked):
    config = make(change)
    assert KVOffloadConnector.get_required_kvcache_layout(config) == ("BLNHC" if asked else None)
    assert resolved(config) == ("BLNHC" if asked else "LBNHC")


@pytest.mark.usefixtures("hopper")
def test_drafts_ask_for_nothing():
    assert KVOffloadConnector.get_required_kvcache_layout(make(drafts=2)) is None


def test_other_devices_ask_for_nothing(monkeypatch):
    """This CPU, whose attention has one order, and Blackwell, where vLLM takes FlashInfer."""
    assert KVOffloadConnector.get_required_kvcache_layout(make()) is None
    play(monkeypatch, 10)
    assert KVOffloadConnector.get_required_kvcache_layout(make()) is None
    flash = make(with_backend("FLASH_ATTN"))
    assert KVOffloadConnector.get_required_kvcache_layout(flash) == "BLNHC"


@pytest.mark.usefixtures("hopper")
def test_a_member_leaves_the_order_to_the_others():
    """vLLM's own connector asks for another, and two hints would end the start."""

    def around(options: dict[str, Any]) -> dict[str, Any]:
        ours = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
        theirs: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        theirs["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 20}
        members = [{**ours, "kv_connector_extra_config": options}, theirs]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": members},
        }

    assert resolved(make(transfer_config=around)) == "LBHNC"
