"""DeepSeek V4 on a GPU without the packages whose kernels vLLM compiles at run time.

vLLM 0.33 has hyper-connections in TileLang and DeepGEMM, the compressor of latents in CuTe DSL, and
the scores of the indexer in DeepGEMM. Without these packages, vLLM's own reference in torch
computes the first. The second is computed by the Triton kernel that vLLM has for other GPUs, which
reads and writes the same cache. The indexer chooses nothing while a prompt has few latents.
Attention is FlashMLA's.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


def use_portable_kernels() -> None:
    """Replace the kernels that cannot be compiled here; call this before an engine starts."""
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.models.deepseek_v4.nvidia import model
    from vllm.utils.import_utils import has_cutedsl, has_deep_gemm, has_tilelang

    if not has_deep_gemm():
        sparse_attn_indexer.has_deep_gemm = lambda: True  # checked, but never called
    if not (has_tilelang() and has_deep_gemm()):
        model.mhc_pre_tilelang = pre
        model.mhc_pre_broadcast_tilelang = pre_broadcast
        model.mhc_fused_post_pre_tilelang = post_and_pre
        model.mhc_post_tilelang = post
        model.hc_head_fused_kernel_tilelang = head
    if not has_cutedsl():
        name = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
        module: Any = types.ModuleType(name)
        module._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL = compress
        sys.modules[name] = module


def compress(*, store_full_kv: bool, store_full_fp8: bool, fp8_scale: Any, **more: Any) -> None:
    """Make latents from a compressor's tokens, in place of vLLM's kernel in CuTe DSL."""
    from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache

    assert not store_full_kv, "FlashMLA's latents have 584 bytes each"
    fused_compress_quant_cache.compress_norm_rope_store_triton(**more)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return normed.to(x.dtype)


def pre(
    residual: torch.Tensor,
    *constants: Any,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mix the streams `(tokens, 4, hidden)` into a layer's input; also return how to mix back."""
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post_mix, streams_mix, x = mhc_pre_torch(residual, *constants)
    return post_mix, streams_mix, _normed(x, norm_weight, norm_eps)


def pre_broadcast(
    x: torch.Tensor, fn: torch.Tensor, *constants: Any, fn_broadcast: Any = None, **norm: Any
) -> tuple[torch.Tensor, ...]:
    """Do the same as `pre` if all streams are the embeddings `(tokens, hidden)`."""
    streams = fn.shape[1] // x.shape[-1]
    residual = x.unsqueeze(1).repeat(1, streams, 1)
    return residual, *pre(residual, fn, *constants, **norm)


def post(
    x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, streams_mix: torch.Tensor
) -> torch.Tensor:
    """Mix a layer's output into the streams."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return mhc_post_torch(x, residual, post_mix, streams_mix)


def post_and_pre(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    streams_mix: torch.Tensor,
    *constants: Any,
    n_splits: int = 1,
    tile_n: int = 1,
    **norm: Any,
) -> tuple[torch.Tensor, ...]:
    """Do the same as `post` with a layer's output, and then as `pre`."""
    residual = post(x, residual, post_mix, streams_mix)
    return residual, *pre(residual, *constants, **norm)


def head(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    eps: float,
) -> torch.Tensor:
    """Mix the streams `(tokens, 4, hidden)` into what the model's head reads."""
    flat = x.flatten(1).float()
    mixes = (flat @ fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    weights = torch.sigmoid(mixes * scale + base) + eps
    return (weights.unsqueeze(-1) * x.float()).sum(dim=1).to(x.dtype)
