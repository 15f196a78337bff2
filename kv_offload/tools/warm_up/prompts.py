"""Reads the file of prompts: JSON Lines, each the body of an OpenAI request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_offload.config.file import show
from kv_offload.errors import ConfigError

ENDPOINTS = {"prompt": "completions", "messages": "chat/completions"}
"""By the key that a line has one of: the endpoint below `/v1` that takes it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the file: where it is, which endpoint takes it, and the request's body."""

    line: int
    endpoint: str
    body: dict[str, Any]


def read_prompts(file: str) -> list[Prompt]:
    """Read all lines, empty ones left out. Raises `ConfigError` with the line that is wrong."""
    try:
        # Not `splitlines`: a string of JSON may have other ends of lines, such as U+2028.
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{show(file)} cannot be read: {error}. Give a file of JSON Lines in UTF-8"
        ) from error
    found = [_parse(file, number, text) for number, text in enumerate(lines, 1) if text.strip()]
    if not found:
        raise ConfigError(f"{file}: no prompt in it. Write one JSON object a line")
    return found


def _parse(file: str, number: int, text: str) -> Prompt:
    try:
        body = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            f"{file}, line {number}: no JSON: {error}. Write one object a line"
        ) from error
    keys = ENDPOINTS.keys() & body.keys() if isinstance(body, dict) else set()
    if len(keys) != 1:
        raise ConfigError(
            f'{file}, line {number}: {show(body)} must be an object with either "prompt" or '
            '"messages"; what else the request needs, such as "cache_salt", may stand beside it'
        )
    return Prompt(number, ENDPOINTS[keys.pop()], body)
