"""The shape of a model's KV cache, and the models that have parts of unknown size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kv_offload.config.file import show
from kv_offload.errors import ConfigError, UnsupportedError
from kv_offload.tools.sizing.fields import Fields, read_fields
from kv_offload.tools.sizing.layers import (
    INDEXED,
    STATE_MODELS,
    State,
    count_indexes,
    count_layers,
    read_state,
)

COMPRESSED = "deepseek_v4"
"""The `model_type` whose latents cover several tokens."""

LATENT = INDEXED | {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe"}
"""Values of `model_type` for which vLLM keeps one latent KV head."""

INDEX_SCALE_NUMBERS = 128
"""Numbers in an index that share a 4-byte scale (`Indexer` in `deepseek_v2`, vLLM 0.32)."""

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")

HEAD_SIZES = ("head_dim", "kv_channels")

STRANGERS = {
    "layers with states (Mamba, linear attention, convolutions)": re.compile(
        r"mamba|ssm_|^state_size$|linear_(attn|num|key|conv)|conv_L_cache|lru_width|attn_layer_|"
        r"attn_type_list|layers_block_type|hybrid_override_pattern|rwkv"
    ),
    "a sparse or compressed cache": re.compile(r"^index_(topk|n_heads|head_dim)|^compress_ratios"),
    "layers of different shapes": re.compile(
        r"^block_configs$|^global_head_dim$|^num_global_key_value_heads$|^swa_|^per_layer_config$|"
        r"^hybrid_layer_pattern$|^attention_other_setting$|^multi_query$|^attn_config$"
    ),
    "layers that read the cache of others": re.compile(r"^num_kv_shared_layers$"),
}
"""Keys with a non-empty value if the cache has parts that the formula lacks."""

KNOWN = dict(zip(STRANGERS, (STATE_MODELS, INDEXED), strict=False))
"""Values of `model_type` with known sizes for the parts that these keys describe."""

CROSS = ("is_encoder_decoder", "cross_attention_layers")
"""Keys of models whose layers also read an encoder's output."""


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's KV cache, over all tensor-parallel ranks."""

    model_type: str
    layers: dict[str, int]
    """Number of layers by kind (`full`, `window`, `chunk`, `state`), without zeros."""
    window_tokens: int
    """Tokens that a layer with a window reads; 0 if no layer has one."""
    kv_heads: int
    head_size: int
    latent: bool
    """True if keys and values are one vector: multi-head latent attention."""
    cache_is_quantized: bool
    assumed: tuple[str, ...] = ()
    """Values that were assumed: they are not in the file, and the model's defaults are unknown."""
    indexes: int = 0
    """Number of layers that keep an index for sparse attention."""
    index_bytes: int = 0
    """Bytes per token of one index."""
    state: State | None = None
    """Shape of a layer's state; None if no layer has one."""
    ratios: tuple[int, ...] = ()
    """Tokens that a latent covers, per layer; 0 without latents. Empty if nothing is compressed."""
    index_size: int = 0
    """Number of values in an index entry of a compressed model."""


def read_model(model: str | Path) -> Model:
    """Read the shape of a model's KV cache from its config.json (see `read_fields`).

    Transformers, if installed, fills in the model's defaults. Raises `ConfigError`, and
    `UnsupportedError` if the size of a part of the cache does not follow from the file.
    """
    fields = read_fields(model)
    if fields.model_type == COMPRESSED:
        return _read_compressed(fields)
    _refuse_other_caches(fields)
    latent = fields.values.get("kv_lora_rank") is not None
    if latent and fields.model_type not in LATENT:
        raise fields.unsupported("has latent attention in a form that is not known")
    if latent:
        kv_heads, head_size = 1, fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
    else:
        kv_heads, head_size = _heads(fields)
    layers = count_layers(fields)
    index_size = fields.number("index_head_dim") if fields.model_type in INDEXED else 0
    return Model(
        model_type=fields.model_type,
        layers=layers,
        window_tokens=fields.number("sliding_window") if "window" in layers else 0,
        kv_heads=kv_heads,
        head_size=head_size,
        latent=latent,
        cache_is_quantized=fields.cache_is_quantized,
        assumed=() if latent or fields.has_defaults else tuple(_assumed(fields)),
        indexes=count_indexes(fields, layers["full"]) if index_size else 0,
        index_bytes=index_size + index_size // INDEX_SCALE_NUMBERS * 4,
        state=read_state(fields) if "state" in layers else None,
    )


def _read_compressed(fields: Fields) -> Model:
    count, ratios = fields.number("num_hidden_layers"), fields.values.get("compress_ratios")
    if ratios is None:  # the name that transformers uses
        rates, types = fields.values.get("compress_rates"), fields.values.get("layer_types")
        if isinstance(rates, dict) and isinstance(types, list):
            ratios = [rates.get(kind, 0) for kind in types if isinstance(kind, str)]
    if not isinstance(ratios, list) or len(ratios) < count:
        raise ConfigError(
            f"{fields.file}: {COMPRESSED} needs compress_ratios, a number for each of its {count} "
            f"layers, and has {show(ratios)}"
        )
    kept = tuple(0 if ratio == 1 else ratio for ratio in ratios[:count])
    if strange := [ratio for ratio in kept if ratio not in (0, 4, 128)]:
        raise fields.unsupported(f"has latents that cover {show(strange[0])} tokens")
    if 4 not in kept:
        raise fields.unsupported("has no layer whose latents cover 4 tokens")
    return Model(
        model_type=COMPRESSED,
        layers={"window": count},
        window_tokens=fields.number("sliding_window"),
        kv_heads=1,
        head_size=fields.number("head_dim"),
        latent=True,
        cache_is_quantized=fields.cache_is_quantized,
        ratios=kept,
        index_size=fields.number("index_head_dim"),
    )


def _refuse_other_caches(fields: Fields) -> None:
    """Raise `UnsupportedError` for a model without a cache, or with parts of unknown size."""
    if "bert" in fields.model_type:  # bert, xlm-roberta, modernbert, nomic_bert, ...
        raise UnsupportedError(
            f"{fields.file}: {fields.model_type} reads each prompt as a whole and has no KV cache, "
            "so there is nothing to keep in host memory. Give the config.json of a model that "
            "generates text"
        )
    if cross := next((k for k in CROSS if fields.values.get(k) or fields.outer.get(k)), None):
        raise UnsupportedError(
            f"{fields.file}: {fields.model_type} has an encoder, which the decoder reads through "
            f"cross attention ({cross}). kv-offload refuses such a model at the start: run it "
            "without kv-offload"
        )
    given = {key: value for key, value in fields.values.items() if value}
    types = given.get("attn_type_list")
    if isinstance(types, list) and all(kind == 1 for kind in types):
        del given["attn_type_list"]  # MiniMax: 1 is full attention, 0 is linear. M2 has only ones.
    for problem, keys in STRANGERS.items():
        strange = next(filter(keys.search, given), None)
        if strange and fields.model_type not in KNOWN.get(problem, ()):
            raise fields.unsupported(f"has {problem} ({strange})")


def _heads(fields: Fields) -> tuple[int, int]:
    """Return the number of KV heads and the size of a key."""
    values, heads = fields.values, fields.number("num_attention_heads")
    kv_heads = next((fields.number(key) for key in KV_HEADS if values.get(key) is not None), heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{fields.file}: num_attention_heads is {heads}, not a multiple of the {kv_heads} KV "
            "heads: correct one of them"
        )
    if named := next((key for key in HEAD_SIZES if values.get(key)), None):
        head_size = fields.number(named)
    else:
        head_size, rest = divmod(fields.number("hidden_size"), heads)
        if rest:
            raise ConfigError(
                f"{fields.file}: hidden_size is {values['hidden_size']}, not a multiple of {heads} "
                "heads (num_attention_heads): correct one of them"
            )
    if values.get("v_head_dim", head_size) not in (head_size, None):
        raise fields.unsupported("has values of another size than keys")
    return kv_heads, head_size


def _assumed(fields: Fields) -> Iterator[str]:
    if all(fields.values.get(key) is None for key in KV_HEADS):
        yield "num_key_value_heads is num_attention_heads"
    if not any(fields.values.get(key) for key in HEAD_SIZES):
        yield "head_dim is hidden_size / num_attention_heads"
