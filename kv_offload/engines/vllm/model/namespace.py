"""Describes what a block's key and bytes mean. Processes share blocks only if the meaning is equal.

A key is vLLM's hash of the tokens, of images and salts, and of the LoRA adapter's name (in vLLM
0.32 and later also its path). Everything else that determines the bytes is described here.

An adapter's files are not read. So an engine with LoRA shares no blocks with other processes
(`start.tiers`), and replacing an adapter under its name requires a reset of the prefix cache.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from kv_offload.engines.vllm.model.groups import engine_groups
from kv_offload.engines.vllm.model.identity import describe_loading, describe_model, digest
from kv_offload.engines.vllm.versions import bytes_per_block, layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FORMAT = 1
"""Changes with the format of a slot's contents or name."""

PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
)
"""Settings that determine which part of a block a rank holds."""

CPU_FLAGS = ("flags", "Features")
"""Keys in /proc/cpuinfo, on x86 and on Arm."""

DRAFTS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
"""Methods that have no draft model and therefore no KV of one."""


def describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Return, by name, everything that must be equal for another process's block to be usable here.

    If each process draws its own hash seed, no two processes' descriptions are equal.
    `layout.describe_pages` adds what only a rank knows.
    """
    import vllm

    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    method = "none" if speculative is None else speculative.method
    groups = engine_groups(vllm_config, kv_cache_config)
    draft, loading = {}, vllm_config.load_config
    if method not in ("none", *DRAFTS_WITHOUT_MODEL):
        of_loading = speculative.draft_load_config or loading
        of_draft = describe_model(speculative.draft_model_config, of_loading.download_dir)
        draft = {"draft": method, **{f"draft_{name}": value for name, value in of_draft.items()}}
    return {
        "format": str(FORMAT),
        "vllm": vllm.__version__,
        "device": _describe_device(),
        **describe_model(vllm_config.model_config, loading.download_dir),
        **describe_loading(vllm_config),
        **draft,
        "lora": "off" if vllm_config.lora_config is None else "on",
        "attention": vllm_config.attention_config.compute_hash()[:16],
        "cache_dtype": str(cache.cache_dtype),
        "cache_layout": str(cache.kv_cache_layout),
        "groups": "; ".join(map(str, groups)),
        "layers": digest(sorted((n, repr(s)) for n, s in layer_specs(kv_cache_config).items())),
        "block_bytes": str(bytes_per_block(kv_cache_config)),
        **{name: str(getattr(parallel, name)) for name in PARALLEL},
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": _hash_seed(vllm_config) or f"drawn, {secrets.token_hex(16)}",
    }


def _describe_device() -> str:
    """Return the device's name and a CPU's instructions, which decide how attention fills pages."""
    from vllm.platforms import current_platform

    name = f"{current_platform.device_name}, {current_platform.get_device_name()}"
    if not current_platform.is_cpu():
        return name
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return f"{name}, {digest([line for line in lines if line.startswith(CPU_FLAGS)][:1])}"


def reproducible_hashes(vllm_config: VllmConfig) -> str | None:
    """Return None if a key means the same in another process, else the reason and the remedy."""
    if _hash_seed(vllm_config) is not None:
        return None
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return (
        f"with prefix_caching_hash_algo {algorithm!r} and without PYTHONHASHSEED vLLM draws a seed "
        "for the hashes of blocks in each process, so nothing is found again: set the "
        "environment variable PYTHONHASHSEED to a number, the same one at every start, or "
        "--prefix-caching-hash-algo to sha256"
    )


def _hash_seed(vllm_config: VllmConfig) -> str | None:
    """Return the seed of vLLM's hash chain; None if each process draws its own."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    resolve = kv_cache_utils.resolve_none_hash_seed
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    first, second = resolve(function), resolve(function)
    return str(first) if first == second else None
