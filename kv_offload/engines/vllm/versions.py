"""The supported versions of vLLM, and accessors for names that differ between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

OLDEST, NEWEST = (0, 31), (0, 33)
"""Minor versions for whose connector interface this plugin was written and tested."""


def check_version(version: str) -> tuple[int, int]:
    """Return vLLM's (major, minor). Raises `UnsupportedError` outside the supported range."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major, minor = -1, -1
    if not OLDEST <= (major, minor) <= NEWEST:
        raise UnsupportedError(
            f"works with vLLM {dotted(OLDEST)} to {dotted(NEWEST)}, this is {version!r}; it "
            "relies on parts of vLLM's scheduler that differ between versions: install a vLLM in "
            "that range or a kv-offload that supports yours"
        )
    return major, minor


def dotted(version: tuple[int, int]) -> str:
    """Return a version as text, such as `0.33`."""
    return ".".join(map(str, version))


def vllm_version() -> tuple[int, int]:
    """Return the running vLLM's (major, minor), checked."""
    import vllm

    return check_version(vllm.__version__)


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """Return the KV-cache spec of every layer; uniform groups keep one per layer."""
    specs: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        specs |= {name: per_layer.get(name, group.kv_cache_spec) for name in group.layer_names}
    return specs


def bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of one block over all tensors of this rank.

    All tensors are views of one allocation, and each gives the size of that allocation.
    """
    return int(kv_cache_config.kv_cache_tensors[0].size) // int(kv_cache_config.num_blocks)


def host_hit_source() -> Any:
    """Return vLLM's label for hits in host memory; None in vLLM 0.31, which has no labels."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def role_accepts_embeddings(vllm_config: Any, transfer_config: Any) -> bool:
    """Return whether vLLM accepts embeddings in place of images because of `kv_role`.

    It then turns on `enable_mm_embeds` and does not record whether the user had set it.
    """
    inputs = vllm_config.model_config.multimodal_config
    encoders = vllm_config.ec_transfer_config
    return (
        transfer_config.is_kv_consumer
        and inputs is not None
        and inputs.enable_mm_embeds
        and inputs.allow_missing_mm_embeddings
        and not (encoders is not None and encoders.is_ec_consumer)
    )
