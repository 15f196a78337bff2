"""Reads from a Hugging Face config.json what decides the size of a KV cache."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_offload.config.files import read_small
from kv_offload.errors import ConfigError, UnsupportedError
from kv_offload.tools.sizing.layers import INDEXED, read_layers
from kv_offload.tools.sizing.states import STATE_MODELS, State, read_state
from kv_offload.tools.sizing.values import positive, unsupported

INNER = ("thinker_config", "text_config", "language_config", "llm_config")
"""Where a model with several parts keeps the configuration of the part that has a KV cache."""

LATENT = INDEXED | {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe"}
"""Values of `model_type` for which vLLM keeps one latent KV head."""

INDEX_SCALE_NUMBERS = 128
"""Numbers of the index that share a scale of 4 bytes (`Indexer` of `deepseek_v2` in vLLM 0.32)."""

QUANTIZATIONS = ("quantization_config", "compression_config")
"""Keys under which a checkpoint says how it is quantized, at the top or beside the text part's."""

QUANTIZATION_FILE = "hf_quant_config.json"
"""Where checkpoints of ModelOpt before 0.31 say it."""

MAX_FILE_BYTES = 64 << 20
"""A config.json has some kilobytes; what is larger are weights, named by mistake."""

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")

HEAD_SIZES = ("head_dim", "kv_channels")

STATES = "layers with states (Mamba, linear attention, convolutions)"
SPARSE = "a sparse or compressed cache"
STRANGERS = {
    STATES: re.compile(
        r"mamba|ssm_|^state_size$|linear_(attn|num|key|conv)|conv_L_cache|lru_width|attn_layer_|"
        r"attn_type_list|layers_block_type|hybrid_override_pattern|rwkv"
    ),
    SPARSE: re.compile(r"^index_(topk|n_heads|head_dim)|^compress_ratios"),
    "layers of different shapes": re.compile(
        r"^block_configs$|^global_head_dim$|^num_global_key_value_heads$|^swa_|^per_layer_config$|"
        r"^hybrid_layer_pattern$|^attention_other_setting$|^multi_query$|^attn_config$"
    ),
    "layers that read the cache of others": re.compile(r"^num_kv_shared_layers$"),
}
"""Keys of models whose cache has parts that the formula lacks, where their value is not empty."""

KNOWN = {STATES: STATE_MODELS, SPARSE: INDEXED}
"""Values of `model_type` that have such parts, and whose parts are known."""

CROSS = ("is_encoder_decoder", "cross_attention_layers")
"""Keys of models whose layers also read what an encoder made of the prompt."""


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's KV cache, over all tensor-parallel ranks."""

    model_type: str
    layers: dict[str, int]
    """How many layers of each kind there are: `full`, `window`, `chunk`, `state`; none has 0."""
    window_tokens: int
    """What a layer with a window reads; 0 where no layer has one."""
    kv_heads: int
    head_size: int
    latent: bool
    """Whether keys and values are one vector: multi-head latent attention."""
    cache_is_quantized: bool
    """Whether the checkpoint itself asks for another type of cache than the model's."""
    assumed: tuple[str, ...] = ()
    """What was taken for values that the file lacks, where nobody knew the model's defaults."""
    index_bytes: int = 0
    """Bytes of a token in the index of a layer with sparse attention."""
    state: State | None = None
    """Of a layer with states, where there are such layers."""


def read_model(path: Path) -> Model:
    """Read a config.json, or the one in a folder.

    Where transformers is installed it adds what the file leaves to the defaults of its model.

    Raises:
        ConfigError: no such file, too large, not JSON, or a value that is missing or of another
            kind than is needed.
        UnsupportedError: the cache has parts whose size the file does not tell.
    """
    # Not by methods of a Path, which raise where a folder may not be read.
    file = path / "config.json" if os.path.isdir(path) else path
    outer = given = _load(file)
    beside = file.with_name(QUANTIZATION_FILE)
    quantized: list[Any] = [_load(beside)] if os.path.exists(beside) else []
    filled = _defaults(given)
    while inner := next((key for key in INNER if isinstance(given.get(key), dict)), None):
        given = given[inner]
        filled = filled[inner] if isinstance(filled.get(inner), dict) else _defaults(given)
    values = {**filled, **{key: value for key, value in given.items() if value is not None}}
    quantized += [part.get(key) for part in (outer, given) for key in QUANTIZATIONS]
    is_quantized = any(_names_a_cache(quantization) for quantization in quantized)
    model = _model(file, values, outer, is_quantized)
    return model if filled else dataclasses.replace(model, assumed=_assumed(model, values))


def _load(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ConfigError`."""
    try:
        given = json.loads(read_small(file, MAX_FILE_BYTES, "a config.json"))
        if not isinstance(given, dict):
            kind = type(given).__name__
            raise ValueError(f"it holds a {kind}, but a config.json is an object")  # noqa: TRY004, TRY301
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read as JSON: {error}. Give the path of a model's config.json, as "
            "Hugging Face has it, or of the folder that holds it; nothing is downloaded by a "
            "model's name"
        ) from error
    return given


def _names_a_cache(quantization: Any) -> bool:
    """Return whether a quantization, or a part of it, has a setting of the KV cache."""
    return isinstance(quantization, dict) and any(
        ("kv_cache" in key and bool(value)) or _names_a_cache(value)
        for key, value in quantization.items()
    )


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the defaults of its model; empty where nobody knows them."""
    if not isinstance(given.get("model_type"), str):
        return {}  # nothing to look up, and the import takes seconds
    try:
        from transformers import CONFIG_MAPPING

        logging.getLogger("transformers").setLevel(logging.ERROR)  # of remarks about tokens
        config = CONFIG_MAPPING[given["model_type"]].from_dict(dict(given))
        filled: dict[str, Any] = config.to_dict()
        # Some models call a value by another name, as GPT-2 does with `n_head`.
        usual = {name: filled.get(own) for name, own in config.attribute_map.items()}
    except Exception:  # noqa: BLE001 - a model that it does not know, or a file that it refuses
        return {}
    return usual | filled


def _model(
    file: Path, values: Mapping[str, Any], outer: Mapping[str, Any], is_quantized: bool
) -> Model:
    model_type = str(values.get("model_type", outer.get("model_type", "unknown")))
    if "bert" in model_type:  # bert, xlm-roberta, modernbert, nomic_bert, ...
        raise UnsupportedError(
            f"{file}: {model_type} reads each prompt as a whole and has no KV cache, so there is "
            "nothing to keep in host memory. Give the config.json of a model that generates text"
        )
    if cross := next((key for key in CROSS if values.get(key) or outer.get(key)), None):
        raise UnsupportedError(
            f"{file}: {model_type} has an encoder, which the decoder reads through cross attention "
            f"({cross}). kv-offload refuses such a model at the start: run it without kv-offload"
        )
    for problem, keys in STRANGERS.items():
        if model_type in KNOWN.get(problem, ()):
            continue
        for key, value in values.items():
            # MiniMax: 1 is full attention, 0 is linear. M2 has ones only.
            plain = (
                key == "attn_type_list" and isinstance(value, list) and all(v == 1 for v in value)
            )
            if keys.search(key) and value and not plain:
                raise unsupported(file, model_type, f"has {problem} ({key})")
    latent = values.get("kv_lora_rank") is not None
    if latent and model_type not in LATENT:
        raise unsupported(file, model_type, "has latent attention in a form that is not known")
    number = functools.partial(positive, file, values)
    if latent:
        kv_heads, head_size = 1, number("kv_lora_rank") + number("qk_rope_head_dim")
    else:
        heads = number("num_attention_heads")
        kv_heads = next((number(key) for key in KV_HEADS if values.get(key) is not None), heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{file}: num_attention_heads is {heads}, not a multiple of the {kv_heads} KV "
                "heads: correct one of them"
            )
        named_size = next((key for key in HEAD_SIZES if values.get(key)), None)
        head_size, rest = (
            (number(named_size), 0) if named_size else divmod(number("hidden_size"), heads)
        )
        if rest:
            raise ConfigError(
                f"{file}: hidden_size is {values['hidden_size']}, not a multiple of {heads} heads "
                "(num_attention_heads): correct one of them"
            )
        if values.get("v_head_dim", head_size) not in (head_size, None):
            raise unsupported(file, model_type, "has values of another size than keys")
    layers = read_layers(file, values, model_type)
    index_size = number("index_head_dim") if model_type in INDEXED else 0
    return Model(
        model_type=model_type,
        layers=layers,
        window_tokens=number("sliding_window") if "window" in layers else 0,
        kv_heads=kv_heads,
        head_size=head_size,
        latent=latent,
        cache_is_quantized=is_quantized,
        index_bytes=index_size + index_size // INDEX_SCALE_NUMBERS * 4,
        state=read_state(model_type, values, number) if "state" in layers else None,
    )


def _assumed(model: Model, values: Mapping[str, Any]) -> tuple[str, ...]:
    assumed = []
    if not model.latent and all(values.get(key) is None for key in KV_HEADS):
        assumed.append("num_key_value_heads is num_attention_heads")
    if not model.latent and not any(values.get(key) for key in HEAD_SIZES):
        assumed.append("head_dim is hidden_size / num_attention_heads")
    return tuple(assumed)
