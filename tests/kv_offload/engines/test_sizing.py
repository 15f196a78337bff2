"""`kv-offload size` gives the sizes that vLLM's own functions give, without a model."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import CacheConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.models import config as model_settings
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kv_offload.engines.vllm.model.groups import cache_groups
from kv_offload.engines.vllm.start.support import CACHE_DTYPES, check_supported
from kv_offload.engines.vllm.versions import bytes_per_block, vllm_version
from kv_offload.tools.sizing.model import Model, read_model
from kv_offload.tools.sizing.slots import CACHE_DTYPES as SIZES
from kv_offload.tools.sizing.slots import slot_size, vector_bytes
from tests.support.configurations import make_vllm_config
from tests.support.planning import (
    SCALED,
    attention_spec,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from tests.support.published_models import PUBLISHED
from tests.support.published_specs import deepseek_v4

ODD = {"nemotron", "nemotron_h", "deepseek_v4"}
"""Kinds of models whose defaults have no number of KV heads, those of whose layers vLLM counts some
that keep nothing, and compressed latents, which vLLM does not call latent."""


def slot_bytes(layers: dict[str, int], cache_dtype: str) -> tuple[int, int]:
    """Return the bytes of a slot, and the number of cache groups."""
    model = Model("llama", layers, 64, 2, 32, latent=False, cache_is_quantized=False)
    size = slot_size(model, tensor_parallel_size=1, cache_dtype=cache_dtype, block_tokens=16)
    return size.slot_bytes, sum(size.groups.values())


@pytest.fixture
def vllm_config() -> Any:
    made = make_vllm_config({})
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


@pytest.mark.parametrize("full", [1, 3, 6])
@pytest.mark.parametrize("windows", [0, 1, 2, 5, 7, 13])
def test_groups_and_slots_are_those_of_vllm(vllm_config, full, windows):
    window_spec = attention_spec(16, SlidingWindowSpec, sliding_window=64)
    specs = {f"full.{i}": attention_spec(16) for i in range(full)}
    specs |= {f"window.{i}": window_spec for i in range(windows)}
    groups = get_kv_cache_groups(vllm_config, specs)
    planned = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
    layers = {"full": full, "window": windows} if windows else {"full": full}
    assert slot_bytes(layers, "auto") == (bytes_per_block(planned), len(groups))


UNKNOWN = re.compile(r"(turbo|ultra)quant_.+|octave_.+|fp8_inc")
"""Types that leave some layers out, or are for the devices of others."""

INT4 = {"kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD, "dtype": torch.uint8}


def test_every_served_type_of_cache_has_a_size_and_scales_are_those_of_vllm():
    unknown = {name for name in CACHE_DTYPES if UNKNOWN.fullmatch(name)}
    assert set(SIZES) == CACHE_DTYPES - unknown
    for name, settings in {**SCALED, "int4_per_token_head": INT4}.items():
        spec = attention_spec(16, **settings)
        assert slot_bytes({"full": 1}, name)[0] == spec.page_size_bytes, name
    for name in ("nvfp4", "nvfp4_4over6"):
        assert vector_bytes(name, 128) == nvfp4_kv_cache_full_dim(128)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_packed_latents_have_the_size_of_vllm(vllm_config, name):
    layer = SimpleNamespace(
        kv_cache_dtype=name,
        head_size=576,
        sliding_window=None,
        topk_buffer_width=None,
        indexer=None,
        non_causal_multi_token_decode=False,
    )
    spec = MLAAttention.get_kv_cache_spec(layer, vllm_config)
    assert vector_bytes(name, 576) * spec.block_size == spec.page_size_bytes


@pytest.mark.parametrize(
    "ratios",
    [
        PUBLISHED["DeepSeek-V4-Flash"]["compress_ratios"],
        [0, 0, *[4, 128] * 20, 4],
        [0, *[4, 128] * 6],
        [4, 128, 4, 4],
        [0, 0, 0, 4],
    ],
    ids=len,
)
def test_compressed_latents_are_planned_as_by_vllm(vllm_config, tmp_path, ratios):
    vllm_config.cache_config.kv_cache_layout = "BLHNC"
    vllm_config.cache_config.block_size = 256
    vllm_config.cache_config.num_gpu_blocks_override = 7
    groups = get_kv_cache_groups(vllm_config, deepseek_v4(ratios))
    planned = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)
    published = {
        **PUBLISHED["DeepSeek-V4-Flash"],
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    size = slot_size(
        read_model(tmp_path), tensor_parallel_size=8, cache_dtype="auto", block_tokens=16
    )
    assert (size.slot_bytes, size.arenas) == (bytes_per_block(planned), 1)
    stored = [group for group in cache_groups(planned) if not group.is_scratch]
    ends = [group for group in stored if group.window_tokens]
    assert size.end_slots == sum(-(-(g.window_tokens - 1) // g.block_tokens) for g in ends)
    assert [g.block_tokens for g in stored if not g.window_tokens] == [256]


QWEN35 = {
    **PUBLISHED["Qwen3-Next-80B-A3B"],
    "model_type": "qwen3_5_text",
    "mamba_ssm_dtype": "float32",
}


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("published", "model_class", "settings"),
    [
        (PUBLISHED["Granite-4.0-H-Small"], GraniteMoeHybridForCausalLM, ""),
        (PUBLISHED["Qwen3-Next-80B-A3B"], Qwen3NextForCausalLM, ""),
        # It has the states of Qwen3-Next, whose class needs fewer packages.
        (QWEN35, Qwen3NextForCausalLM, "Qwen3_5ForConditionalGenerationConfig"),
        (PUBLISHED["Nemotron-3-Nano-30B-A3B"], NemotronHForCausalLM, "NemotronHForCausalLMConfig"),
    ],
)
def test_states_are_those_of_vllm(tmp_path, published, model_class, settings, ranks):
    """By the methods with which vLLM itself finds out how large a block must be."""
    config = CONFIG_MAPPING[published["model_type"]].from_dict(published)
    asked = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config, dtype=torch.bfloat16),
        cache_config=CacheConfig(),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    if settings:
        getattr(model_settings, settings).verify_and_update_config(asked)
    spec = MambaSpec(
        block_size=16,
        shapes=tuple(model_class.get_mamba_state_shape_from_config(asked)),
        dtypes=tuple(model_class.get_mamba_state_dtype_from_config(asked)),
    )
    (tmp_path / "config.json").write_text(json.dumps(published))
    size = slot_size(
        read_model(tmp_path), tensor_parallel_size=ranks, cache_dtype="auto", block_tokens=16
    )
    assert size.state_bytes == spec.page_size_bytes
    smaller = (size.block_tokens - 16) * size.layer_bytes
    assert smaller < size.state_bytes <= smaller + 16 * size.layer_bytes


@pytest.mark.parametrize(
    ("name", "every"), [("DeepSeek-V3.2", 1), ("GLM-5", 1), ("GLM-5", 4)], ids=str
)
def test_a_model_with_an_index_is_accepted_and_has_the_size_of_vllm(
    vllm_config, tmp_path, name, every
):
    """The index of a layer is a layer of its own to vLLM, in the same group."""
    published = PUBLISHED[name] | {"index_topk_freq": every}
    vllm_config.cache_config.block_size = 64
    specs = {}
    with set_current_vllm_config(vllm_config):
        for i in range(published["num_hidden_layers"]):
            latent = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
            specs[f"{i}.attn"] = MLAAttentionSpec(block_size=64, **latent)
            if max(i - 1, 0) % every:  # as `DeepseekV32Attention` does it
                continue
            index = DeepseekV32IndexerCache(
                128 + 4, torch.uint8, f"{i}.indexer", vllm_config.cache_config
            )
            specs[index.prefix] = index.get_kv_cache_spec(vllm_config)
    groups = get_kv_cache_groups(vllm_config, specs)
    planned = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)
    check_supported(vllm_config, vllm_version(), (), planned)
    (tmp_path / "config.json").write_text(json.dumps(published))
    size = slot_size(
        read_model(tmp_path), tensor_parallel_size=1, cache_dtype="auto", block_tokens=64
    )
    assert len(groups) == 1
    assert size.slot_bytes == bytes_per_block(planned)


def test_heads_of_every_kind_of_model_are_those_of_vllm(tmp_path):
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
    known = {
        kind for kind in ("qwen3_next", "deepseek_v32", "glm_moe_dsa") if kind in CONFIG_MAPPING
    }
    assert known <= set(agreed)
