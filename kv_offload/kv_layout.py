"""Turns the KV tensors that the engine registers into the regions that `transfer` copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kv_offload.engine_compat import layer_specs
from kv_offload.errors import UnsupportedError
from transfer.errors import LayoutError
from transfer.layout import KVLayout, TensorDescription

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def describe_kv_caches(kv_caches: Mapping[str, Any], kv_cache_config: KVCacheConfig) -> KVLayout:
    """Return the layout of the registered tensors, one per attention layer.

    Raises `UnsupportedError`, naming the layer and its shape, for a layout that could not be copied
    exactly.
    """
    num_blocks = kv_cache_config.num_blocks
    specs = layer_specs(kv_cache_config)
    tensors = []
    for name, tensor in kv_caches.items():
        shape = tuple(getattr(tensor, "shape", ()))
        if name not in specs or not shape:
            raise UnsupportedError(
                f"layer {name}: its KV cache is a {type(tensor).__name__} that kv-offload does not "
                "know; run this model without kv-offload"
            )
        itemsize = tensor.element_size()
        tensors.append(
            TensorDescription(
                name=name,
                address=tensor.data_ptr(),
                shape=shape,
                strides_bytes=tuple(stride * itemsize for stride in tensor.stride()),
                itemsize=itemsize,
                block_dim=_block_dim(name, shape, num_blocks),
                page_bytes=specs[name].page_size_bytes,
            )
        )
    try:
        return KVLayout.from_tensors(num_blocks, tensors)
    except LayoutError as error:
        raise UnsupportedError(f"{error}; run this model without kv-offload") from error


def _block_dim(name: str, shape: tuple[int, ...], num_blocks: int) -> int:
    """Find the dimension that a block id indexes: the first, or the second behind one for K and V.

    Backends whose kernels use smaller blocks than the manager multiply it.
    """
    for dim in (0, 1):
        if num_blocks > 2 and dim < len(shape) and shape[dim] and shape[dim] % num_blocks == 0:
            return dim
    raise UnsupportedError(
        f"layer {name}: neither of the first two dimensions of its KV cache of shape {shape} is a "
        f"multiple of the {num_blocks} blocks of the cache (at least 3 are needed to tell); run "
        "this model without kv-offload"
    )
