from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kv_offload.errors import UnsupportedError
from kv_offload.kv_layout import describe_kv_caches
from kv_offload.prefix import CacheGroup
from tests.kv_offload.fakes import make_kv_cache_config
from transfer.layout import KVLayout

BLOCKS, TOKENS, HEADS, HEAD_SIZE = 6, 4, 2, 8
BLOCK_SHAPE = (HEADS, TOKENS, 2 * HEAD_SIZE)
PAGE_BYTES = 2 * HEADS * TOKENS * HEAD_SIZE * 4


def config(*, blocks: int = BLOCKS, **head_sizes: int) -> Any:
    """Return a configuration of one group; layers of several head sizes make it a uniform one."""
    head_sizes = head_sizes or {"layer": HEAD_SIZE}
    specs = {
        name: FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=size, dtype=torch.float32
        )
        for name, size in head_sizes.items()
    }
    made = make_kv_cache_config([CacheGroup(0, TOKENS)], blocks)
    (group,) = made.kv_cache_groups
    group.layer_names = list(specs)
    group.kv_cache_spec = next(iter(specs.values()))
    if len(specs) > 1:
        group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    return made


def cache(*shape: int) -> torch.Tensor:
    """Return a tensor that starts at a multiple of 64 bytes, as an engine's does."""
    nbytes = math.prod(shape) * 4
    raw = torch.zeros(nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    return raw[start : start + nbytes].view(torch.float32).view(shape)


def regions(layout: KVLayout, *tensors: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (tensor's offset, page, stride) of every region, offsets from the first tensor."""
    base = tensors[0].data_ptr()
    return [(r.address - base, r.page_bytes, r.block_stride_bytes) for r in layout.regions]


# -- what is described -------------------------------------------------------------------------


def test_blocks_first() -> None:
    tensor = cache(BLOCKS, *BLOCK_SHAPE)
    layout = describe_kv_caches({"layer": tensor}, config())
    assert layout.num_blocks == BLOCKS
    assert layout.slot_bytes == PAGE_BYTES
    assert regions(layout, tensor) == [(0, PAGE_BYTES, PAGE_BYTES)]


def test_keys_and_values_first() -> None:
    tensor = cache(2, BLOCKS, HEADS, TOKENS, HEAD_SIZE)
    half = PAGE_BYTES // 2
    layout = describe_kv_caches({"layer": tensor}, config())
    assert regions(layout, tensor) == [(0, half, half), (BLOCKS * half, half, half)]


def test_kernel_blocks_that_are_smaller_than_the_managers() -> None:
    tensor = cache(4 * BLOCKS, HEADS, TOKENS // 4, 2 * HEAD_SIZE)
    layout = describe_kv_caches({"layer": tensor}, config())
    assert regions(layout, tensor) == [(0, PAGE_BYTES, PAGE_BYTES)]


def test_a_tensor_whose_blocks_are_strided() -> None:
    """All layers of a block lie together; each layer's tensor is a view."""
    storage = cache(BLOCKS, 3, *BLOCK_SHAPE)
    caches = {f"layer.{i}": storage[:, i] for i in range(3)}
    layout = describe_kv_caches(caches, config(**dict.fromkeys(caches, HEAD_SIZE)))
    assert regions(layout, storage) == [(0, 3 * PAGE_BYTES, 3 * PAGE_BYTES)]


def test_layers_of_a_uniform_group_have_pages_of_their_own() -> None:
    caches = {
        "small": cache(BLOCKS, *BLOCK_SHAPE),
        "large": cache(BLOCKS, HEADS, TOKENS, 4 * HEAD_SIZE),
    }
    layout = describe_kv_caches(caches, config(small=HEAD_SIZE, large=2 * HEAD_SIZE))
    assert sorted(region.page_bytes for region in layout.regions) == [PAGE_BYTES, 2 * PAGE_BYTES]
    assert layout.slot_bytes == 3 * PAGE_BYTES


def test_layers_that_share_their_memory_are_described_once() -> None:
    tensor = cache(BLOCKS, *BLOCK_SHAPE)
    shared = {"a": tensor, "b": tensor.view(BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)}
    layout = describe_kv_caches(shared, config(a=HEAD_SIZE, b=HEAD_SIZE))
    assert layout.slot_bytes == PAGE_BYTES


# -- what is refused ---------------------------------------------------------------------------


def refusal(caches: dict[str, Any], kv_cache_config: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        describe_kv_caches(caches, kv_cache_config)
    message = str(caught.value)
    assert message.endswith("run this model without kv-offload")
    return message


def test_a_layer_that_is_in_no_group() -> None:
    message = refusal({"stranger": cache(BLOCKS, *BLOCK_SHAPE)}, config())
    assert "layer stranger" in message


def test_a_layer_whose_cache_is_no_tensor() -> None:
    message = refusal({"layer": [cache(BLOCKS, 4), cache(BLOCKS, 4)]}, config())
    assert "layer layer: its KV cache is a list that kv-offload does not know" in message


def test_a_tensor_without_a_dimension_of_blocks() -> None:
    message = refusal({"layer": cache(BLOCKS + 1, *BLOCK_SHAPE)}, config())
    assert "layer layer" in message
    assert str((BLOCKS + 1, *BLOCK_SHAPE)) in message
    assert f"the {BLOCKS} blocks of the cache" in message


def test_blocks_in_the_third_dimension() -> None:
    assert "neither of the first two" in refusal({"layer": cache(2, 2, BLOCKS, 64)}, config())


def test_an_empty_dimension_is_not_mistaken_for_blocks() -> None:
    assert "neither of the first two" in refusal({"layer": torch.zeros(0, 4, 4)}, config())


@pytest.mark.parametrize("blocks", [1, 2])
def test_too_few_blocks_to_tell_them_from_keys_and_values(blocks: int) -> None:
    message = refusal({"layer": cache(2, blocks, *BLOCK_SHAPE)}, config(blocks=blocks))
    assert "at least 3 are needed" in message


def test_a_page_that_is_smaller_than_its_data() -> None:
    message = refusal({"layer": cache(BLOCKS, HEADS, TOKENS, 4 * HEAD_SIZE)}, config())
    assert message.startswith("layer: page_bytes is 512")


def test_a_page_that_is_not_aligned() -> None:
    made = config()
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=3, dtype=torch.float32)
    made.kv_cache_groups[0].kv_cache_spec = spec
    assert "no multiple of 16" in refusal({"layer": cache(BLOCKS, 1, 1, 6)}, made)


def test_no_layer_at_all() -> None:
    assert "no KV tensors" in refusal({}, config())
