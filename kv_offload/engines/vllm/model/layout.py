"""Describes the engine's registered KV tensors as regions for `kv_swap` to copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kv_swap.errors import LayoutError
from kv_swap.layout import KVLayout, Packing, TensorDescription
from kv_swap.packing.format import FORMAT_VERSION, GROUP_VALUES, TILE_BYTES

from kv_offload.config.sizes import format_size
from kv_offload.engines.vllm.model.groups import STATE_SPEC, scratch_layers
from kv_offload.engines.vllm.model.identity import digest
from kv_offload.engines.vllm.versions import layer_specs
from kv_offload.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def layer_regions(kv_caches: Mapping[str, Any], layout: KVLayout) -> dict[str, frozenset[int]]:
    """Return, for each registered layer, the regions of the layout that it reads.

    `layout` describes these tensors. A layer that reads another layer's cache has that layer's
    regions; a layer that is not stored has none.
    """
    found: dict[str, set[int]] = {}
    for index, region in enumerate(layout.regions):
        for name in region.tensors:
            found.setdefault(name, set()).add(index)
    for name, cache in kv_caches.items():
        if name not in found:
            owners = (other for other in list(found) if kv_caches[other] is cache)
            found[name] = set().union(*(found[owner] for owner in owners))
    return {name: frozenset(regions) for name, regions in found.items()}


def describe_kv_caches(
    kv_caches: Mapping[str, Any], kv_cache_config: KVCacheConfig, *, packs: bool = False
) -> KVLayout:
    """Return the layout of the registered tensors, one per layer, without scratch layers.

    With `packs`, slots hold packed data wherever it can be packed.

    Raises `UnsupportedError`, with the layer and its shape, if the tensors could not be copied
    exactly.
    """
    num_blocks = kv_cache_config.num_blocks
    specs, scratch = layer_specs(kv_cache_config), scratch_layers(kv_cache_config)
    tensors: list[TensorDescription] = []
    try:
        for name, cache in kv_caches.items():
            if name in scratch:
                continue
            if name in specs:
                page_bytes = specs[name].page_size_bytes
                tensors.append(_describe(name, cache, num_blocks, page_bytes))
            elif not any(cache is kv_caches[other] for other in specs if other in kv_caches):
                raise _unknown(name, cache)  # else it reads another layer's cache
        layout = KVLayout.from_tensors(num_blocks, tensors)
        return layout.packed(_packings(kv_caches, kv_cache_config)) if packs else layout
    except LayoutError as error:
        raise UnsupportedError(f"{error}; run this model without kv-offload") from error


def _describe(name: str, cache: Any, num_blocks: int, page_bytes: int) -> TensorDescription:
    if not getattr(cache, "shape", None):
        raise _unknown(name, cache)
    dim = block_dim(name, tuple(cache.shape), num_blocks)
    return TensorDescription.of(name, cache, num_blocks, dim, page_bytes)


def _unknown(name: str, cache: Any) -> LayoutError:
    return LayoutError(
        f"layer {name}: its KV cache is a {type(cache).__name__} that kv-offload does not know"
    )


def block_dim(name: str, shape: tuple[int, ...], num_blocks: int) -> int:
    """Return the dimension that a block id indexes: the first, or the second if K and V are first.

    Backends whose kernels use smaller blocks than the manager multiply the dimension's size.
    """
    for dim in (0, 1):
        if num_blocks > 2 and dim < len(shape) and shape[dim] and shape[dim] % num_blocks == 0:
            return dim
    raise LayoutError(
        f"layer {name}: neither of the first two dimensions of its KV cache of shape {shape} is a "
        f"multiple of the {num_blocks} blocks of the cache (at least 3 are needed to tell)"
    )


def _packings(kv_caches: Mapping[str, Any], kv_cache_config: KVCacheConfig) -> dict[str, Packing]:
    """Return the packing of each layer with bfloat16 attention KV that can be packed."""
    import torch

    specs, num_blocks = layer_specs(kv_cache_config), kv_cache_config.num_blocks
    return {
        name: packing
        for name, cache in kv_caches.items()
        if name in specs.keys() - scratch_layers(kv_cache_config)
        and type(specs[name]).__name__ != STATE_SPEC
        and cache.dtype == torch.bfloat16
        and (packing := _packing(name, cache, num_blocks, specs[name].block_size)) is not None
    }


def _packing(name: str, cache: torch.Tensor, num_blocks: int, block_tokens: int) -> Packing | None:
    """Return how a layer's channels repeat in its page; None if tokens do not align with groups.

    The values of a channel, in one head of K or V, are similar across tokens, so they are packed
    together. The token dimension is the last one of the right size: a head dimension of the same
    size comes before it. A wrong guess costs space, not correctness.
    """
    block = block_dim(name, tuple(cache.shape), num_blocks)
    tokens = block_tokens * num_blocks // cache.shape[block]
    strides = [
        stride
        for dim, (size, stride) in enumerate(zip(cache.shape, cache.stride(), strict=True))
        if dim != block and size == tokens and stride % GROUP_VALUES == 0
    ]
    if not strides:
        return None
    period = strides[-1] // GROUP_VALUES
    return Packing(period, period * tokens)


def describe_unpacked(kv_caches: Mapping[str, Any], layout: KVLayout) -> str:
    """Return why nothing is packed, with the remedy."""
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in kv_caches.values()})
    largest = max(region.page_bytes for region in layout.regions)
    return (
        f"pack_kv is true, but nothing is packed: that needs bfloat16 KV of attention with pages "
        f"of {format_size(TILE_BYTES)} or more, and this cache has {' and '.join(kinds)} in pages "
        f"of {format_size(largest)} at most. Set --block-size higher for larger pages, or pack_kv "
        "to false"
    )


def describe_pages(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    *,
    packs: bool = False,
) -> str:
    """Return a digest of where a slot holds each value of a block on this rank.

    This depends on the attention backend that vLLM chose for the rank and on packing, but not on
    the number of blocks.
    """
    layout = describe_kv_caches(kv_caches, kv_cache_config, packs=packs)
    layers = vllm_config.compilation_config.static_forward_context
    found: list[Any] = [[(sorted(r.tensors), r.page_bytes) for r in layout.regions]]
    if packed := [(index, r.packing) for index, r in enumerate(layout.regions) if r.packing]:
        found.append((FORMAT_VERSION, repr(packed)))
    scratch = scratch_layers(kv_cache_config)
    for name, cache in kv_caches.items():
        if name in scratch:
            continue
        backend = getattr(layers.get(name), "get_attn_backend", None)
        found.append((name, backend and backend().__qualname__))
        offsets = [cache.data_ptr() - region.address for region in layout.regions]
        inside = zip(offsets, layout.regions, strict=True)
        where = [o if 0 <= o < region.page_bytes else None for o, region in inside]
        found.append((where, str(cache.dtype), *_page_dims(name, cache, layout.num_blocks)))
    return digest(found)


def _page_dims(name: str, tensor: torch.Tensor, num_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield size and stride of each dimension within a block; stride 0 if it exceeds a block's."""
    dim = block_dim(name, tuple(tensor.shape), num_blocks)
    kernel_blocks = tensor.shape[dim] // num_blocks
    block_stride = kernel_blocks * tensor.stride(dim)
    for index, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        inside = stride <= block_stride
        yield kernel_blocks if index == dim else size, stride if inside else 0
