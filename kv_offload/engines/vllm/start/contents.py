"""The description that all of an engine's blocks in lower tiers share."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from kv_offload.engines.vllm.model import namespace
from kv_offload.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


PROCESS = "process"
"""Key in a description whose value no other process has."""


def check_contents(
    vllm_config: VllmConfig,
    key: str,
    *,
    private: bool = False,
    keep_on_reset: bool,
    remedy: str = "",
) -> None:
    """Raise `ConfigError` if another process could not know what keys or bytes of blocks mean.

    `key` is the tier's section of the configuration, and `keep_on_reset` the value of that key in
    it. `remedy` is an alternative to offer. Blocks that are `private`, or of an engine with LoRA,
    are for no other process.
    """
    has_lora = vllm_config.lora_config is not None
    is_shared = not private and not has_lora
    if is_shared and (problem := namespace.reproducible_hashes(vllm_config)):
        raise ConfigError(
            f"{key}: blocks kept there would be useless to any other process: {problem}{remedy}"
        )
    if has_lora and keep_on_reset:
        raise ConfigError(
            f"{key}.keep_on_reset: true: an engine with LoRA must drop the blocks of an "
            "adapter that was replaced under its name, and does so by a reset: remove the key"
        )


def describe_contents(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, private: bool = False
) -> dict[str, str]:
    """Return by name everything that must be equal for another process's block to be usable here.

    With `private` or LoRA, no other process's description is equal.
    """
    contents = namespace.describe(vllm_config, kv_cache_config)
    if private or vllm_config.lora_config is not None:
        # An adapter's files may change under its name, and a key includes only the name.
        contents[PROCESS] = secrets.token_hex(16)
    return contents
