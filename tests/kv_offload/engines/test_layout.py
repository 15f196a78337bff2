from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kv_swap.layout import KVLayout
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.model.layout import describe_kv_caches, layer_regions
from kv_offload.errors import UnsupportedError
from tests.support.configurations import make_kv_cache_config, set_layers

BLOCKS, TOKENS, HEADS, HEAD_SIZE = 6, 4, 2, 8
BLOCK_SHAPE = (HEADS, TOKENS, 2 * HEAD_SIZE)
PAGE_BYTES = 2 * HEADS * TOKENS * HEAD_SIZE * 4
HALF_BYTES = PAGE_BYTES // 2


def config(*, blocks: int = BLOCKS, **head_sizes: int) -> Any:
    """Return a configuration of one group; layers of several head sizes make it a uniform one."""
    made = make_kv_cache_config([CacheGroup(0, TOKENS)], blocks)
    set_layers(
        made,
        {
            name: FullAttentionSpec(
                block_size=TOKENS, num_kv_heads=HEADS, head_size=size, dtype=torch.float32
            )
            for name, size in (head_sizes or {"layer": HEAD_SIZE}).items()
        },
    )
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


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # Blocks first.
        ((BLOCKS, *BLOCK_SHAPE), [(0, PAGE_BYTES, PAGE_BYTES)]),
        # Keys and values first.
        (
            (2, BLOCKS, HEADS, TOKENS, HEAD_SIZE),
            [(0, HALF_BYTES, HALF_BYTES), (BLOCKS * HALF_BYTES, HALF_BYTES, HALF_BYTES)],
        ),
    ],
)
def test_where_the_blocks_are(shape, expected):
    tensor = cache(*shape)
    layout = describe_kv_caches({"layer": tensor}, config())
    assert (layout.num_blocks, layout.slot_bytes) == (BLOCKS, PAGE_BYTES)
    assert regions(layout, tensor) == expected


def state_config(page_bytes: int) -> Any:
    made = config()
    spec = MambaSpec(
        block_size=TOKENS,
        shapes=((3, 8),),
        dtypes=(torch.float32,),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )
    set_layers(made, {"layer": spec})
    return made


def test_states_are_not_packed():
    """Not even a tensor of bfloat16 numbers: what it holds is no KV."""
    caches = {"layer": torch.zeros(BLOCKS, TOKENS, 1 << 13, dtype=torch.bfloat16)}
    layout = describe_kv_caches(caches, state_config(TOKENS << 14), packs=True)
    assert [region.packing for region in layout.regions] == [None]


def refusal(caches: dict[str, Any], kv_cache_config: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        describe_kv_caches(caches, kv_cache_config)
    message = str(caught.value)
    assert message.endswith("run this model without kv-offload")
    return message


REFUSED = {
    "no layer": ({}, "there are no KV tensors"),
    "a layer in no group": ({"stranger": cache(BLOCKS, *BLOCK_SHAPE)}, "layer stranger"),
    "a page smaller than its data": (
        {"layer": cache(BLOCKS, HEADS, TOKENS, 4 * HEAD_SIZE)},
        "layer: page_bytes is 512",
    ),
    **{
        f"no tensor: {nothing}": (
            {"layer": nothing},
            f"layer layer: its KV cache is a {kind} that kv-offload does not know",
        )
        for nothing, kind in (([], "list"), (None, "NoneType"), (3, "int"))
    },
    **{
        f"no dimension of blocks: {shape}": (
            {"layer": cache(*shape)},
            "layer layer: neither of the first two dimensions of its KV cache of shape "
            f"{shape} is a multiple of the {BLOCKS} blocks of the cache",
        )
        for shape in ((BLOCKS + 1, *BLOCK_SHAPE), (2, 2, BLOCKS, 64), (0, 4, 4))
    },
}


@pytest.mark.parametrize(("caches", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_copied_exactly(caches, problem):
    assert refusal(caches, config()).startswith(f"kv-offload: {problem}")


@pytest.mark.parametrize("blocks", [1, 2])
def test_too_few_blocks_to_tell_them_from_keys_and_values(blocks):
    message = refusal({"layer": cache(2, blocks, *BLOCK_SHAPE)}, config(blocks=blocks))
    assert "at least 3 are needed" in message


def test_a_page_that_is_not_aligned():
    made = config()
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=3, dtype=torch.float32)
    set_layers(made, {"layer": spec})
    assert "not a multiple of 16" in refusal({"layer": cache(BLOCKS, 1, 1, 6)}, made)


def test_layers_and_their_regions():
    """K and V apart are two regions; a layer without a cache of its own reads another's."""
    first, second = cache(2, BLOCKS, HEADS, TOKENS, HEAD_SIZE), cache(BLOCKS, *BLOCK_SHAPE)
    caches = {"first": first, "second": second, "reader": first}
    layout = describe_kv_caches(caches, config(first=HEAD_SIZE, second=HEAD_SIZE))
    found = layer_regions(caches, layout)
    assert found["first"] == found["reader"]
    assert {len(found["first"]), len(found["second"])} == {1, 2}
    assert found["first"] | found["second"] == {0, 1, 2}
    for name, tensor in (("first", first), ("second", second)):
        end = tensor.data_ptr() + tensor.numel() * 4
        assert all(tensor.data_ptr() <= layout.regions[i].address < end for i in found[name])


def test_layers_that_share_their_bytes_share_a_region():
    """Groups that overlay each other; layers side by side in a block have a region each."""
    both, same = cache(BLOCKS, 2, *BLOCK_SHAPE), cache(BLOCKS, *BLOCK_SHAPE)
    for caches, places, of_b in (
        ({"a": both[:, 0], "b": both[:, 1]}, [0, PAGE_BYTES], 1),
        ({"a": same, "b": same.view(same.shape)}, [0], 0),
    ):
        layout = describe_kv_caches(caches, config(a=HEAD_SIZE, b=HEAD_SIZE))
        stride = len(places) * PAGE_BYTES
        assert regions(layout, caches["a"]) == [(place, PAGE_BYTES, stride) for place in places]
        assert layout.slot_bytes == stride
        assert layer_regions(caches, layout) == {"a": frozenset([0]), "b": frozenset([of_b])}
