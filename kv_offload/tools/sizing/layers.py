"""Counts a model's layers by kind, and reads the shape of their states."""

from __future__ import annotations

from dataclasses import dataclass

from kv_offload.config.file import show
from kv_offload.errors import ConfigError
from kv_offload.tools.sizing.fields import Fields

INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Values of `model_type` with a latent KV head and an index in most layers."""

ALL_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Values of `model_type` whose layers all have a window if the configuration has one."""

MAMBA_2 = frozenset({"granitemoehybrid", "nemotron_h"})
STATE_MODELS = MAMBA_2 | {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Values of `model_type` with known states: Mamba 2 or gated delta nets."""

KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
}
"""The kind of layer for each entry in `layer_types`."""

KINDS_OF_SOME = {
    **{kind: {"mamba": "state", "linear_attention": "state"} for kind in STATE_MODELS},
    **{kind: {"indexed_attention": "full"} for kind in INDEXED},
}
KINDS_OF_SOME["nemotron_h"] |= {"M": "state", "*": "full"}
KINDS_OF_SOME["nemotron_h"] |= dict.fromkeys(("-", "E", "mlp", "moe"), "none")
"""The kinds for additional entries, by `model_type`."""


def count_layers(fields: Fields) -> dict[str, int]:
    """Return the number of layers of each kind."""
    types, model_type = fields.values.get("layer_types"), fields.model_type
    if model_type == "nemotron_h":
        names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
        types = next(filter(None, map(fields.values.get, names)), None)
        types = [*types] if isinstance(types, str) else types
    if model_type == "nemotron_h" and isinstance(types, list):
        count = len(types)
    else:
        count = fields.number("num_hidden_layers")
    if types is None:
        window = fields.values.get("sliding_window")
        has_windows = window and fields.values.get("use_sliding_window", True)
        has_chunks = fields.values.get("attention_chunk_size")
        if not has_windows and not has_chunks and model_type not in STATE_MODELS:
            return {"full": count}
        if model_type in ALL_WINDOWS:
            return {"window": count}
        raise ConfigError(
            f"{fields.file}: {model_type} has windows, chunks or states, and no layer_types says "
            "in which layers. Run kv-offload in a Python with transformers, which knows the "
            "defaults of models, or add layer_types to the file"
        )
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        shown = show(types)
        raise ConfigError(f"{fields.file}: layer_types is {shown}, but a list of names is needed")
    known = KINDS | KINDS_OF_SOME.get(model_type, {})
    if strange := [kind for kind in types if kind not in known]:
        raise fields.unsupported(f"has layers of the type {strange[0]}")
    kinds = [known[kind] for kind in types]
    if len(kinds) != count:
        raise ConfigError(
            f"{fields.file}: layer_types has {len(kinds)} entries, num_hidden_layers is {count}: "
            "correct one of them"
        )
    if "state" in kinds and "full" not in kinds:
        raise fields.unsupported("has states and no layer with full attention")
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds) if kind != "none"}


def count_indexes(fields: Fields, num_layers: int) -> int:
    """Return how many layers keep an index; the others use an earlier layer's.

    This follows `DeepseekV32Attention` in vLLM 0.32.
    """
    pattern = fields.values.get("index_topk_pattern")
    if isinstance(pattern, str):
        return num_layers - pattern[:num_layers].count("S")
    every = fields.number("index_topk_freq") if fields.values.get("index_topk_freq") else 1
    offset = fields.values.get("index_skip_topk_offset")
    offset = offset if isinstance(offset, int) else 2
    return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))


_STATE_TYPE = "mamba_ssm_cache_dtype"


@dataclass(frozen=True, slots=True)
class State:
    """The shape of one layer's state, summed over all tensor-parallel ranks.

    A state holds the last columns that the convolution reads and one matrix per head
    (`MambaStateShapeCalculator` in vLLM 0.32).
    """

    inner_channels: int
    """Channels of the convolution that the heads own."""
    groups: int
    """Number of head groups; a group's heads share `group_channels` additional channels."""
    group_channels: int
    columns: int
    heads: int
    head_numbers: int
    recurrent_bytes: int | None = None
    """Bytes per number in the heads' matrices; None for the model's data type."""

    def rank_bytes(self, ranks: int, number_bytes: int) -> int:
        """Return the bytes on one of `ranks`. Raises `ConfigError` if the state cannot be split.

        A single group is copied to every rank.
        """
        for name, count in (("heads", self.heads), ("groups", self.groups)):
            if count % ranks and (name == "heads" or count > 1):
                raise ConfigError(
                    f"--tensor-parallel-size is {ranks}, and the states have {count} {name}: give "
                    f"a divisor of {count}"
                )
        groups = ranks if self.groups % ranks else self.groups
        channels = (self.inner_channels + groups * self.group_channels) // ranks
        convolution_bytes = channels * self.columns * number_bytes
        numbers = self.heads // ranks * self.head_numbers
        return convolution_bytes + numbers * (self.recurrent_bytes or number_bytes)


def read_state(fields: Fields) -> State:
    """Return the state of a model in `STATE_MODELS`."""
    number = fields.number
    is_float32 = fields.values.get("mamba_ssm_dtype") == "float32"
    if fields.model_type == "nemotron_h":
        heads, size = number("mamba_num_heads"), number("ssm_state_size")
        return State(
            inner_channels=heads * number("mamba_head_dim"),
            groups=number("n_groups"),
            group_channels=2 * size,
            columns=number("conv_kernel") - 1,
            heads=heads,
            head_numbers=number("mamba_head_dim") * size,
            recurrent_bytes=4 if fields.values.get(_STATE_TYPE, "float32") == "float32" else None,
        )
    if fields.model_type in MAMBA_2:
        return State(
            inner_channels=number("mamba_expand") * number("hidden_size"),
            groups=number("mamba_n_groups"),
            group_channels=2 * number("mamba_d_state"),
            columns=number("mamba_d_conv") - 1,
            heads=number("mamba_n_heads"),
            head_numbers=number("mamba_d_head") * number("mamba_d_state"),
        )
    key_size, value_size = number("linear_key_head_dim"), number("linear_value_head_dim")
    heads = number("linear_num_value_heads")
    # Qwen3.5 names the data type of its recurrent state; others use the model's.
    return State(
        inner_channels=heads * value_size,
        groups=number("linear_num_key_heads"),
        group_channels=2 * key_size,
        columns=number("linear_conv_kernel_dim") - 1,
        heads=heads,
        head_numbers=value_size * key_size,
        recurrent_bytes=4 if is_float32 and fields.model_type != "qwen3_next" else None,
    )
