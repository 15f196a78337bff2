"""`kv-offload size` gives the sizes that vLLM's own functions give, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kv_offload.engines.vllm.start.support import CACHE_DTYPES
from kv_offload.engines.vllm.versions import bytes_per_block, reports_failed_requests, vllm_version
from kv_offload.sizing.model import Model, read_model
from kv_offload.sizing.slots import CACHE_DTYPES as SIZES
from kv_offload.sizing.slots import slot_size
from tests.support.configurations import make_vllm_config
from tests.support.planning import (
    SCALED,
    attention_spec,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)

pytestmark = pytest.mark.filterwarnings("default")

ODD = {"nemotron"}
"""Kinds of models whose defaults say nothing of KV heads, which vLLM takes for no number."""


def shape_of(layers: dict[str, int]) -> Model:
    return Model("llama", layers, 64, 2, 32, latent=False, cache_is_quantized=False)


def test_every_served_type_of_cache_has_a_size() -> None:
    assert set(SIZES) == CACHE_DTYPES


@pytest.mark.parametrize("full", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("windows", [0, 1, 2, 5, 7, 13])
def test_groups_and_slots_are_those_of_vllm(full: int, windows: int) -> None:
    window_spec = attention_spec(16, SlidingWindowSpec, sliding_window=64)
    specs = {f"full.{i}": attention_spec(16) for i in range(full)}
    specs |= {f"window.{i}": window_spec for i in range(windows)}
    vllm_config = make_vllm_config({})
    if reports_failed_requests(vllm_version()):
        vllm_config.cache_config.kv_cache_layout = "LBHNC"
    groups = get_kv_cache_groups(vllm_config, specs)
    planned = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
    layers = {"full": full, "window": windows} if windows else {"full": full}
    model = shape_of(layers)
    size = slot_size(model, tensor_parallel_size=1, cache_dtype="auto", block_tokens=16)
    assert sum(size.groups.values()) == len(groups)
    assert size.slot_bytes == bytes_per_block(planned)


@pytest.mark.parametrize("name", SCALED)
def test_scales_per_token_and_head_are_those_of_vllm(name: str) -> None:
    spec = attention_spec(16, **SCALED[name])
    model = shape_of({"full": 1})
    size = slot_size(model, tensor_parallel_size=1, cache_dtype=name, block_tokens=16)
    assert size.slot_bytes == spec.page_size_bytes


def test_heads_of_every_kind_of_model_are_those_of_vllm(tmp_path: Path) -> None:
    """For the defaults of every kind that transformers knows, unless it is refused."""
    module = pytest.importorskip(
        "vllm.transformers_utils.model_arch_config_convertor",
        reason="this vLLM reads configurations in another place",
    )
    agreed, differ = [], {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[kind]()
            (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
            model = read_model(tmp_path)
        except Exception:  # noqa: BLE001 - refused, or a kind without defaults
            continue
        converter = module.MODEL_ARCH_CONFIG_CONVERTORS.get(
            kind, module.ModelArchConfigConvertorBase
        )(config, config.get_text_config())
        latent = converter.is_deepseek_mla()
        heads = 1 if latent else converter.get_total_num_kv_heads()
        theirs = (latent, heads, converter.get_head_size(), converter.get_num_hidden_layers())
        ours = (model.latent, model.kv_heads, model.head_size, sum(model.layers.values()))
        if ours == theirs:
            agreed.append(kind)
        else:
            differ[kind] = (ours, theirs)
    assert set(differ) <= ODD, differ
    assert len(agreed) > 80
    assert {"llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "llama4"} <= set(agreed)
