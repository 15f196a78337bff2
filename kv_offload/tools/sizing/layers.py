"""Which kinds of layers a model has, and how many of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv_offload.config.file import show
from kv_offload.errors import ConfigError
from kv_offload.tools.sizing.states import STATE_MODELS
from kv_offload.tools.sizing.values import positive, unsupported

INDEXED = frozenset({"deepseek_v32"})
"""Values of `model_type` for which vLLM keeps a latent KV head and an index of it in each layer."""

ALL_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Values of `model_type` whose layers all have the window, if the configuration has one."""

KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
}
"""What an entry of `layer_types` means."""

KINDS_OF_SOME = {
    **{kind: {"mamba": "state", "linear_attention": "state"} for kind in STATE_MODELS},
    **{kind: {"indexed_attention": "full"} for kind in INDEXED},
}
"""What other entries mean, by the `model_type` whose layers are known."""


def read_layers(file: Path, values: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Return the number of layers of each kind."""
    count = positive(file, values, "num_hidden_layers")
    types = values.get("layer_types")
    if types is None:
        has_window = values.get("sliding_window") and values.get("use_sliding_window", True)
        has_chunks = values.get("attention_chunk_size")
        if not has_window and not has_chunks and model_type not in STATE_MODELS:
            return {"full": count}
        if model_type in ALL_WINDOWS:
            return {"window": count}
        raise ConfigError(
            f"{file}: {model_type} has windows, chunks or states, and no layer_types says in which "
            "layers. Run kv-offload in a Python with transformers, which knows the defaults of "
            "models, or add layer_types to the file"
        )
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ConfigError(f"{file}: layer_types is {show(types)}, but a list of names is needed")
    known = KINDS | KINDS_OF_SOME.get(model_type, {})
    strange = [kind for kind in types if kind not in known]
    if strange:
        raise unsupported(file, model_type, f"has layers of the type {strange[0]}")
    kinds = [known[kind] for kind in types]
    if len(kinds) != count:
        raise ConfigError(
            f"{file}: layer_types has {len(kinds)} entries, num_hidden_layers is {count}: correct "
            "one of them"
        )
    if "state" in kinds and "full" not in kinds:
        raise unsupported(file, model_type, "has states and no layer with full attention")
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
