from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_swap.errors import LayoutError
from kv_swap.layout import KVLayout, Packing, Region, TensorDescription, packed_slot_bytes

from tests.support.kv_memory import Storage, check_exact, dense_strides
from tests.support.packed_kv import packed_cache

AXES = "LBHNC"
"""Layers, blocks, heads, tokens, content."""
LAYER, BLOCK, *_, CONTENT = range(5)


def layers_of(
    sizes: tuple[int, ...],
    order: tuple[int, ...],
    itemsize: int,
    num_blocks: int,
    block_padding: int = 0,
) -> tuple[Storage, list[TensorDescription]]:
    """One storage in memory `order`; layers have the axes (block, head, token, content)."""
    strides = dense_strides(sizes, order, itemsize)
    if block_padding and order[0] == BLOCK:
        strides[BLOCK] += block_padding
    nbytes = itemsize + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    storage = Storage(nbytes + block_padding)
    tensors = [
        storage.describe(
            f"layer.{layer}",
            num_blocks,
            sizes[1:],
            strides[1:],
            itemsize=itemsize,
            offset=layer * strides[LAYER],
        )
        for layer in range(sizes[LAYER])
    ]
    return storage, tensors


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_named_layouts(name, kernel_blocks):
    sizes = (3, 4 * kernel_blocks, 2, 8, 16)
    storage, tensors = layers_of(sizes, tuple(map(AXES.index, name)), 2, 4)
    layout = KVLayout.from_tensors(4, tensors)
    check_exact(layout, storage)
    expected = {"BHLNC": 1, "LHBNC": 3 * 2}
    if kernel_blocks > 1:
        expected |= {"BLHNC": 1, "BLNHC": 1}  # a page is a piece of every kernel block
    assert len(layout.regions) == expected.get(name, 3)


@settings(max_examples=300, deadline=None)
@given(
    order=st.permutations(range(5)),
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
    num_blocks=st.integers(2, 4),
    kernel_blocks=st.integers(1, 3),
    content=st.sampled_from([1, 4, 8, 16]),
    itemsize=st.sampled_from([1, 2, 4]),
    block_padding=st.sampled_from([0, 16, 48]),
)
def test_any_permutation_is_exact_or_refused(
    order, sizes, num_blocks, kernel_blocks, content, itemsize, block_padding
):
    layers, heads, tokens, _ = sizes
    all_sizes = (layers, num_blocks * kernel_blocks, heads, tokens, content)
    storage, tensors = layers_of(all_sizes, tuple(order), itemsize, num_blocks, block_padding)
    try:
        layout = KVLayout.from_tensors(num_blocks, tensors)
    except LayoutError as error:
        # Only alignment may stand in the way, and not where whole 16-byte rows lie together.
        assert "multiple of 16" in str(error)  # noqa: PT017 - not every example raises
        assert order[-1] != CONTENT or content * itemsize % 16
    else:
        check_exact(layout, storage)


def test_padding_and_scales_inside_the_page_travel():
    # 4 heads of 64 bytes and 4 float32 scales in a page padded to 320 bytes.
    storage = Storage(5 * 320)
    data = storage.describe("data", 5, (5, 4, 64), (320, 64, 1), page_bytes=320)
    layout = KVLayout.from_tensors(5, [data])
    assert layout.regions == (Region(storage.address, 320, 320, 0),)
    check_exact(layout, storage, padding=True)


@pytest.mark.parametrize("padding", [0, 16])
def test_key_and_value_halves_are_two_regions_padded_evenly(padding):
    page = 80 + padding
    storage = Storage(2 * 3 * page)
    tensor = storage.describe(
        "kv", 3, (2, 3, 80), (3 * page, page, 1), block_dim=1, page_bytes=2 * page
    )
    layout = KVLayout.from_tensors(3, [tensor])
    assert layout.regions == (
        Region(storage.address, page, page, 0),
        Region(storage.address + 3 * page, page, page, page),
    )
    check_exact(layout, storage, padding=bool(padding))


@pytest.mark.parametrize(
    ("stride", "pages", "expected"),
    [
        # Layers of different page sizes, block-outer, then bytes that no tensor has.
        (240, [(0, 64), (64, 144)], [(0, 208)]),
        # A gap between them: they stay apart.
        (256, [(0, 64), (128, 64)], [(0, 64), (128, 64)]),
        # Mamba: convolution state and recurrent state are two views of the same padded page.
        (256, [(0, 96), (96, 128)], [(0, 224)]),
        # Layers, blocks outermost: a load may bring the first of them before the others.
        (240, [(0, 80), (80, 80), (160, 80)], [(0, 80), (80, 80), (160, 80)]),
        # MLA: one tensor, one page.
        (576, [(0, 576)], [(0, 576)]),
    ],
)
def test_pages_that_touch_become_one(stride, pages, expected):
    storage = Storage(4 * stride)
    tensors = [
        storage.describe(f"at {offset}", 4, (4, nbytes), (stride, 1), offset=offset)
        for offset, nbytes in pages
    ]
    layout = KVLayout.from_tensors(4, tensors[::-1])
    found = sorted((r.address - storage.address, r.page_bytes) for r in layout.regions)
    assert found == expected
    check_exact(layout, storage)


def test_overlaid_groups_are_copied_once():
    storage = Storage(6 * 512)
    attention = storage.describe("attention", 6, (6, 2, 256), (512, 256, 1))
    window = storage.describe("window", 6, (12, 256), (256, 1))
    state = storage.describe("state", 6, (6, 300), (512, 1), page_bytes=512)
    for group in itertools.permutations([attention, window, state, attention]):
        layout = KVLayout.from_tensors(6, group)
        assert layout.regions == (Region(storage.address, 512, 512, 0),)
        check_exact(layout, storage)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_slot_holds_the_tensors_in_their_order_wherever_they_lie(reverse):
    storages = sorted([Storage(4 * 64) for _ in range(3)], key=lambda s: s.address, reverse=reverse)
    tensors = [
        storage.describe(f"layer.{i}", 4, (4, 64), (64, 1)) for i, storage in enumerate(storages)
    ]
    layout = KVLayout.from_tensors(4, tensors)
    assert [region.address for region in layout.regions] == [s.address for s in storages]
    assert [region.slot_offset_bytes for region in layout.regions] == [0, 64, 128]


BASE = TensorDescription("layer.7", 1 << 20, (4, 64), (64, 1), 1, 0, 64)


changed = partial(replace, BASE)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (changed(shape=(6, 64)), "6 blocks.*not a multiple of the 4"),
        (changed(shape=(4, 0)), "dimension 1 has size 0"),
        (changed(strides_bytes=(64, -1)), "dimension 1 .* stride -1"),
        (changed(block_dim=2), "block_dim 2"),
        (changed(strides_bytes=(64,)), "do not fit together"),
        (changed(page_bytes=48), "page_bytes is 48, but the data of one block take 64"),
        (changed(page_bytes=80), "80 bytes of a page are more than the block stride of 64"),
        (changed(address=(1 << 20) + 8), "address 1048584 is not a multiple of 16"),
        (changed(page_bytes=56, shape=(4, 56)), "page_bytes 56 is not a multiple of 16"),
        (changed(strides_bytes=(72, 1)), "block stride 72 is not a multiple of 16"),
        (changed(shape=(4, 1 << 17), strides_bytes=(1 << 20, 2), page_bytes=1 << 17), "pieces"),
        (
            changed(shape=(3, 4, 64), strides_bytes=(256, 64, 1), block_dim=1, page_bytes=200),
            "3 pieces of 64 data bytes cannot share evenly",
        ),
    ],
)
def test_refuses(tensor, message):
    with pytest.raises(LayoutError, match=message) as caught:
        KVLayout.from_tensors(4, [tensor])
    assert "layer.7" in str(caught.value)


def test_size_one_dimensions_may_have_any_stride():
    tensor = changed(shape=(4, 1, 64), strides_bytes=(64, 0, 1))
    assert KVLayout.from_tensors(4, [tensor]).regions == (Region(1 << 20, 64, 64, 0),)


@pytest.mark.parametrize(
    "other",
    [
        # The same bytes read with another stride: block 1 of one is half of block 0 of the other.
        changed(name="b", shape=(4, 32), strides_bytes=(32, 1), page_bytes=32),
        # Shifted by half a page: the end of block 0 is the start of block 1.
        changed(name="b", address=(1 << 20) + 32),
        # Shifted by a whole block: block 0 of one is block 1 of the other.
        changed(name="b", address=(1 << 20) + 64),
        changed(name="b", address=(1 << 20) - 64),
        changed(name="b", address=(1 << 20) + 3 * 64),
    ],
)
def test_refuses_bytes_shared_by_different_blocks(other):
    for tensors in ([BASE, other], [other, BASE]):
        with pytest.raises(LayoutError, match="overlap where no copy could be exact"):
            KVLayout.from_tensors(4, tensors)


@pytest.mark.parametrize(("num_blocks", "tensors"), [(0, [BASE]), (4, [])])
def test_refuses_nothing(num_blocks, tensors):
    with pytest.raises(LayoutError, match=r"num_blocks is 0|no KV tensors"):
        KVLayout.from_tensors(num_blocks, tensors)


def test_shared_bytes_against_brute_force():
    """Two strided tensors at all small offsets: refused exactly when blocks share bytes."""
    num_blocks, stride = 3, 64
    for offset in range(0, 4 * stride, 16):
        for first_bytes, second_bytes in itertools.product((16, 32, 64), repeat=2):
            owners = [
                {
                    start + block * stride + byte: block
                    for block in range(num_blocks)
                    for byte in range(nbytes)
                }
                for start, nbytes in ((0, first_bytes), (offset, second_bytes))
            ]
            shared = owners[0].keys() & owners[1].keys()
            wrong = any(owners[0][byte] != owners[1][byte] for byte in shared)
            beyond = bool(shared) and max(first_bytes, offset + second_bytes) > stride
            tensors = [
                changed(shape=(3, first_bytes), page_bytes=first_bytes),
                changed(
                    address=(1 << 20) + offset, shape=(3, second_bytes), page_bytes=second_bytes
                ),
            ]
            if wrong or beyond:
                with pytest.raises(LayoutError, match="overlap"):
                    KVLayout.from_tensors(num_blocks, tensors)
            else:
                layout = KVLayout.from_tensors(num_blocks, tensors)
                assert layout.slot_bytes == (len(owners[0].keys() | owners[1].keys()) // num_blocks)


KIB = 1 << 10


def packed_sizes(layout: KVLayout) -> list[tuple[int, int, int]]:
    return [(r.num_tiles, r.slot_offset_bytes, r.slot_page_bytes) for r in layout.regions]


def test_packed_pages_come_first_and_the_pool_last():
    pages = [512, 16 * KIB, 40 * KIB, 8 * KIB, 32 * KIB]
    layout, _ = packed_cache(2, pages, [None, Packing(16), Packing(8), Packing(8), Packing(16)])
    assert packed_sizes(layout) == [
        (0, 71552, 512),
        (1, 0, 12672),
        (2, 12672, 25344 + 8 * KIB),
        (0, 72064, 8 * KIB),  # less than a tile
        (2, 46208, 25344),
    ]
    assert layout.regions[3].packing is None
    assert layout.num_tiles == 5
    assert layout.block_bytes == sum(pages)
    assert layout.pool_offset_bytes == 80256
    assert layout.pool_entries == 1
    assert layout.slot_bytes == 80256 + 4 * KIB
    assert layout.slot_bytes == packed_slot_bytes([16 * KIB, 40 * KIB, 32 * KIB], 8 * KIB + 512)


def test_a_slot_of_many_tiles_takes_less_than_78_percent():
    for page, num_pages in ((16 * KIB, 128), (64 * KIB, 32), (128 * KIB, 64), (2048 * KIB, 1)):
        layout, _ = packed_cache(2, [page] * num_pages, [Packing(16)] * num_pages)
        assert layout.slot_bytes <= 0.78 * layout.block_bytes
        assert layout.slot_bytes % 128 == layout.pool_offset_bytes % 128 == 0
        assert all(region.slot_offset_bytes % 128 == 0 for region in layout.regions)


def test_what_is_not_packed_is_copied_as_it_is():
    layout, _ = packed_cache(2, [512, 16 * KIB, 40 * KIB], [None, Packing(16), Packing(8)])
    small, whole, rest = (region.raw_part for region in layout.regions)
    assert small == layout.regions[0]
    assert whole is None
    assert rest is not None
    region = layout.regions[2]
    assert (rest.address, rest.page_bytes) == (region.address + 32 * KIB, 8 * KIB)
    assert rest.block_stride_bytes == region.block_stride_bytes
    assert rest.slot_offset_bytes == region.slot_offset_bytes + 25344
    assert rest.num_tiles == 0


def test_without_a_page_to_pack_the_layout_is_the_same():
    layout, _ = packed_cache(2, [8 * KIB, 16 * KIB], [None, None])
    assert layout.packed({"0": Packing(16)}) is layout
    assert layout.packed({}) is layout
    assert layout.slot_bytes == layout.block_bytes == 24 * KIB
    assert packed_slot_bytes([], 24 * KIB) == 24 * KIB


def test_tensors_that_share_a_region_are_packed_only_if_they_agree():
    storage = Storage(4 * 32 * KIB)
    tensors = [storage.describe(name, 4, (4, 32 * KIB), (32 * KIB, 1)) for name in ("one", "other")]
    layout = KVLayout.from_tensors(4, tensors)
    assert len(layout.regions) == 1
    agreed = layout.packed({"one": Packing(16), "other": Packing(16)})
    assert agreed.regions[0].packing == Packing(16)
    assert layout.packed({"one": Packing(16)}) is layout
    assert layout.packed({"one": Packing(16), "other": Packing(8)}) is layout


def test_a_slot_that_would_grow_is_not_packed():
    one, _ = packed_cache(2, [16 * KIB], [Packing(16)])
    assert one.num_tiles == 0
    two, _ = packed_cache(2, [32 * KIB], [Packing(16)])
    assert two.slot_bytes < two.block_bytes
