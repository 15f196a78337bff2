"""Reads the values in a Hugging Face config.json, with the defaults of its model type."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_offload.config.file import read_small, show
from kv_offload.errors import ConfigError, UnsupportedError

INNER = ("thinker_config", "text_config", "language_config", "llm_config")
"""Keys under which a multi-part model keeps the configuration of the part with a KV cache."""

QUANTIZATIONS = ("quantization_config", "compression_config")
QUANTIZATION_FILE = "hf_quant_config.json"
"""The keys, at the top or in the text part, and the file (ModelOpt before 0.31) that describe a
checkpoint's quantization."""

_MODEL_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)

MAX_FILE_BYTES = 64 << 20
"""A config.json has a few kilobytes; a larger file is probably a file of weights."""


MAX_NUMBER = 1_000_000
"""More than any model's layers, heads or channels, but few enough for a list."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a config.json for the part of a model that has a KV cache."""

    file: Path
    model_type: str
    values: Mapping[str, Any]
    outer: Mapping[str, Any]
    """The file's top level; the same as `values` if the model has only one part."""
    has_defaults: bool
    """True if transformers has filled in the defaults of the model type."""
    cache_is_quantized: bool
    """True if the checkpoint itself requests a cache type other than the model's."""

    def number(self, key: str) -> int:
        """Return a value in the file, an integer from 1 to `MAX_NUMBER`. Raises `ConfigError`."""
        value = self.values.get(key)
        if value is None:
            raise ConfigError(
                f"{self.file}: has no {key}. Give the config.json of a model that generates text; "
                "if it leaves values to defaults, run kv-offload in a Python with transformers, "
                "which knows them"
            )
        if type(value) is not int or not 1 <= value <= MAX_NUMBER:
            raise ConfigError(
                f"{self.file}: {key} is {show(value)}, but one positive integer for all layers is "
                f"needed, of {MAX_NUMBER:,} at most"
            )
        return value

    def unsupported(self, problem: str) -> UnsupportedError:
        """Return the error for a model whose cache has parts unknown to this command."""
        return UnsupportedError(
            f"{self.file}: {self.model_type} {problem}, whose size does not follow from this file. "
            "Start the engine with kv-offload: it refuses what it cannot serve, else its log says "
            "how many bytes a slot takes"
        )


def read_fields(model: str | Path) -> Fields:
    """Read a config.json: a file, or that of a folder or a model in the Hugging Face cache.

    Raises `ConfigError`.
    """
    path = Path(os.path.expanduser(model))
    # os.path, because Path's methods raise if a folder may not be read.
    file = path / "config.json" if os.path.isdir(path) else path
    if _MODEL_NAME.fullmatch(str(model)) and not os.path.exists(path):
        file = _find_in_cache(str(model))
    outer = given = _load(file)
    beside = file.with_name(QUANTIZATION_FILE)
    quantized: list[Any] = [_load(beside)] if os.path.exists(beside) else []
    filled = _defaults(given)
    while inner := next((key for key in INNER if isinstance(given.get(key), dict)), None):
        given = given[inner]
        filled = filled[inner] if isinstance(filled.get(inner), dict) else _defaults(given)
    values = {**filled, **{key: value for key, value in given.items() if value is not None}}
    quantized += [part.get(key) for part in (outer, given) for key in QUANTIZATIONS]
    return Fields(
        file=file,
        model_type=str(values.get("model_type", outer.get("model_type", "unknown"))),
        values=values,
        outer=outer,
        has_defaults=bool(filled),
        cache_is_quantized=any(map(_names_a_cache, quantized)),
    )


def _find_in_cache(name: str) -> Path:
    """Return the config.json of a downloaded model, without contacting a server."""
    where = "nor is huggingface_hub here, which knows of downloaded models"
    with contextlib.suppress(ImportError):
        from huggingface_hub import constants, try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return Path(found)
        where = f"nor such a model in {constants.HF_HUB_CACHE}"
    raise ConfigError(
        f"{name}: there is no such folder here, {where}. Give the path of a config.json, or fetch "
        f"this file alone: hf download {name} config.json"
    )


def _load(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ConfigError`."""
    try:
        given = json.loads(read_small(file, MAX_FILE_BYTES, "a config.json"))
        if not isinstance(given, dict):
            kind = type(given).__name__
            raise ValueError(f"it holds a {kind}, but a config.json is an object")  # noqa: TRY004, TRY301
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read as JSON: {error}. Give a model's config.json, as "
            "Hugging Face has it, the folder that holds it, or the name of a downloaded model, "
            "such as Qwen/Qwen3-8B"
        ) from error
    return given


def _names_a_cache(quantization: Any) -> bool:
    """Return whether a quantization, or a part of it, has a setting for the KV cache."""
    return isinstance(quantization, dict) and any(
        ("kv_cache" in key and bool(value)) or _names_a_cache(value)
        for key, value in quantization.items()
    )


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with its model's defaults; empty if they are unknown."""
    if not isinstance(given.get("model_type"), str):
        return {}  # nothing to look up, and importing transformers takes seconds
    layers = given.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_NUMBER:
        return {}  # transformers would build a list of this length; `number` refuses the value
    try:
        from transformers import CONFIG_MAPPING

        logging.getLogger("transformers").setLevel(logging.ERROR)  # hides remarks about tokens
        config = CONFIG_MAPPING[given["model_type"]].from_dict(dict(given))
        filled: dict[str, Any] = config.to_dict()
        # Some models use another name for a value, such as `n_head` in GPT-2.
        usual = {name: filled.get(own) for name, own in config.attribute_map.items()}
    except Exception:  # noqa: BLE001 - an unknown model, or a file that transformers refuses
        return {}
    return usual | filled
