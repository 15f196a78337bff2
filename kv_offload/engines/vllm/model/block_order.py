"""The KV cache order that the connector asks vLLM for: all layers of a block together.

A block then needs one copy instead of one per layer. vLLM adopts the order if every attention
backend supports it, and logs otherwise. `VLLM_KV_CACHE_LAYOUT` takes precedence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCKS_OUTERMOST = "BLNHC"
"""Block, layer, token, head, content. Pages stay contiguous, so loads can arrive by layer."""

BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Attention backends whose kernels read any order."""


MOST_HEAD_SIZE = 128
"""FlashAttention 4 uses other block sizes for heads of 256."""


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Return the name of a layout, or None to leave the choice to vLLM.

    In orders other than its own, vLLM refuses blocks that an attention kernel splits, and models
    whose pages differ. So this requires blocks that no kernel splits, and one kind of attention.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    backend = vllm_config.attention_config.backend
    if backend is None:
        # On Blackwell and later vLLM chooses FlashInfer, which does not support this order.
        known = capability is not None and capability.major < 10
    else:
        known = backend.name in BACKENDS
    return BLOCKS_OUTERMOST if known and _is_plain(vllm_config) else None


def _is_plain(vllm_config: VllmConfig) -> bool:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    special = (
        cache.user_specified_block_size and not _is_taken_whole(cache.block_size, model),
        cache.cache_dtype not in ("auto", "bfloat16", "float16"),
        vllm_config.speculative_config is not None,
        vllm_config.parallel_config.decode_context_parallel_size > 1,
        model.is_hybrid,
        model.is_attention_free,
        model.is_encoder_decoder,
        model.use_mla,
        _mixes_attention(model.hf_text_config),
    )
    return not any(special)


def _is_taken_whole(block_tokens: int, model: Any) -> bool:
    """Return whether kernels of `BACKENDS` do not split blocks; some for large heads do."""
    return block_tokens % 16 == 0 and model.get_head_size() <= MOST_HEAD_SIZE


def _mixes_attention(text_config: Any) -> bool:
    """Return whether layers may differ in kind of attention or page size."""
    kinds = getattr(text_config, "layer_types", None)
    names = ("sliding_window_pattern", "attention_chunk_size", "attn_type_list", "block_configs")
    return len(set(kinds or ())) > 1 or any(getattr(text_config, name, None) for name in names)
