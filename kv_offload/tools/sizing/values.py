"""Numbers of a config.json, and the error for what they do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv_offload.config.file import show
from kv_offload.errors import ConfigError, UnsupportedError

MAX_NUMBER = 1 << 31
"""No layer, head or window of a model is as many."""


def positive(file: Path, values: Mapping[str, Any], key: str) -> int:
    """Return a positive integer of the file. Raises `ConfigError`."""
    value = values.get(key)
    if value is None:
        raise ConfigError(
            f"{file}: has no {key}. Give the config.json of a model that generates text; if it "
            "leaves values to defaults, run kv-offload in a Python with transformers, which knows "
            "them"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_NUMBER:
        raise ConfigError(
            f"{file}: {key} is {show(value)}, but one positive integer for all layers is needed, "
            f"of at most {MAX_NUMBER:,}"
        )
    return value


def unsupported(file: Path, model_type: str, problem: str) -> UnsupportedError:
    """Return the error for a model whose cache has parts that are not known here."""
    return UnsupportedError(
        f"{file}: {model_type} {problem}, whose size this file does not tell. Start the engine "
        "with kv-offload: it refuses what it cannot serve, else its log says how many bytes a slot "
        "takes"
    )
