"""What a test gives an engine: tokens, and the plugin's configuration."""

from __future__ import annotations

import functools
import random
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from tests.support.small_models import VOCABULARY

Tokens = list[int]

BLOCK_TOKENS = 32
BLOCK_BYTES = 32768
"""For the small dense model in float32."""


def random_tokens(count: int, seed: int) -> Tokens:
    """Return tokens that share no prefix with those of any other seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


_PREFIXES = [random_tokens(150 + 61 * seed % 700, seed) for seed in range(24)]


def busy_requests(count: int, seed: int = 7) -> dict[str, tuple[Tokens, int]]:
    """Return prompts by request, and the number of tokens to generate for each.

    They have separate ends, and 24 beginnings of 150 to 850 tokens, some more common than others.
    """
    chance = random.Random(seed)
    asked = {}
    for index in range(count):
        prefix = _PREFIXES[min(chance.randrange(24), chance.randrange(24))]
        tail = random_tokens(chance.randrange(70), 1000 + index)
        asked[f"r{index}"] = ([*prefix, *tail], chance.randrange(4, 25))
    return asked


def transfer_config(plugin: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """Return the configuration that a user writes, with room for a few thousand small blocks."""
    config = {
        "kv_connector": "KVOffloadConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"cpu_bytes": "64MiB", **plugin},
    }
    if not _is_installed():
        # For a checkout on a host where nothing can be installed.
        config["kv_connector_module_path"] = "kv_offload.engines.vllm.connector"
    return config


@functools.cache
def _is_installed() -> bool:
    return bool(entry_points(group="vllm.general_plugins", name="kv_offload"))
