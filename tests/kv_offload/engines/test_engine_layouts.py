"""Store and load KV caches that vLLM itself has planned and allocated, with the host engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kv_swap.cuda.block_copies import runs_of
from kv_swap.engine import Direction, SwapJob
from kv_swap.factory import create_engine
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import allocate_kv_cache

from kv_offload.cache.prefix import PrefixMap
from kv_offload.engines.vllm.model.groups import cache_groups, scratch_layers
from kv_offload.engines.vllm.model.layout import (
    describe_kv_caches,
    describe_pages,
    describe_unpacked,
    layer_regions,
)
from kv_offload.engines.vllm.start.support import check_supported
from kv_offload.engines.vllm.versions import bytes_per_block, layer_specs, vllm_version
from kv_offload.errors import UnsupportedError
from tests.support.configurations import make_vllm_config
from tests.support.planning import (
    SCALED,
    attention_spec,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from tests.support.published_specs import MODELS

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
NUM_BLOCKS = 7
POISON = 0x55


def group(name: str, layers: int, spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([f"{name}.{i}" for i in range(layers)], spec)


def groups_of(kind: str, tokens: int) -> list[KVCacheGroupSpec]:
    """Return the cache groups of a kind of model, for blocks of this many tokens."""
    full = attention_spec(tokens)
    window = attention_spec(tokens, SlidingWindowSpec, sliding_window=96)
    latent = MLAAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    state = MambaSpec(
        block_size=tokens,
        shapes=((3, 24), (2, 8, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align",
    )
    two_pages = {"small": full, "large": attention_spec(tokens, head_size=64)}
    uniform = UniformTypeKVCacheSpecs(block_size=tokens, kv_cache_specs=two_pages)
    padded = replace(full, page_size_padded=full.page_size_bytes + 256)
    return {
        "dense": [group("full", 3, full)],
        "windows": [group("full", 2, full), group("window", 2, window)],
        "latent": [group("latent", 2, latent)],
        "states": [group("full", 2, full), group("state", 2, state)],
        "two pages": [KVCacheGroupSpec(list(two_pages), uniform)],
        "padded": [group("padded", 2, padded)],
    }[kind]


@dataclass
class Built:
    """A KV cache as an engine registers it."""

    config: Any
    caches: dict[str, Any]

    def block(self, tensor: torch.Tensor, block: int) -> bytes:
        """Return what a layer reads of a manager's block, over its kernel blocks."""
        ratio = tensor.shape[0] // NUM_BLOCKS
        rows = tensor[block * ratio : (block + 1) * ratio]
        return rows.contiguous().view(torch.uint8).numpy().tobytes()

    def contents(self, block: int) -> list[bytes]:
        scratch = scratch_layers(self.config)
        kept = (tensor for name, tensor in self.caches.items() if name not in scratch)
        return [self.block(tensor, block) for tensor in kept]

    def storages(self) -> Iterator[torch.Tensor]:
        seen = set()
        for tensor in self.caches.values():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield torch.tensor([], dtype=torch.uint8).set_(storage)


def build(groups: list[KVCacheGroupSpec], layout: str, kernel_tokens: int | None = None) -> Built:
    """Plan and allocate a KV cache with vLLM's own functions."""
    vllm_config = make_vllm_config({})
    vllm_config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    vllm_config.cache_config.kv_cache_layout = layout
    config = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
    assert config.num_blocks == NUM_BLOCKS
    kernel_sizes = [kernel_tokens or g.kv_cache_spec.block_size for g in groups]
    resolved = vllm_config.cache_config.get_resolved_kv_cache_layout()
    return Built(config, allocate_kv_cache(config, torch.device("cpu"), resolved, kernel_sizes))


def round_trip(
    built: Built, moves: Sequence[tuple[int, int]] = ((1, 5), (3, 2)), *, packs: bool = False
) -> None:
    """Store blocks, poison the cache, load them into other blocks; nothing else may change."""
    layout = describe_kv_caches(built.caches, built.config, packs=packs)
    assert layout.block_bytes <= bytes_per_block(built.config)
    generator = torch.Generator().manual_seed(7)
    for storage in built.storages():
        if packs:
            values = torch.randn(storage.numel() // 2, generator=generator)
            storage.copy_(values.to(torch.bfloat16).view(torch.uint8))
            continue
        storage.copy_(torch.randint(0, 256, storage.shape, generator=generator, dtype=torch.uint8))
    stored = {source: built.contents(source) for source, _ in moves}
    engine = create_engine(
        "host", layout, 4, device=torch.device("cpu"), keep_alive=[*built.caches.values()]
    )
    try:
        pairs = np.array([(source, slot) for slot, (source, _) in enumerate(moves)], np.int32)
        engine.submit(SwapJob(0, Direction.STORE, pairs))
        assert engine.wait(120)
        for storage in built.storages():
            storage.fill_(POISON)
        pairs = np.array([(target, slot) for slot, (_, target) in enumerate(moves)], np.int32)
        engine.submit(SwapJob(1, Direction.LOAD, pairs))
        assert engine.wait(120)
        assert [(done.error, done.refused_rows) for done in engine.poll()] == [(None, ())] * 2
    finally:
        engine.close()
    for source, target in moves:
        assert built.contents(target) == stored[source]
        assert len(set(b"".join(stored[source]))) > 100, "the content is random"
    untouched = set(range(NUM_BLOCKS)) - {target for _, target in moves}
    for block in untouched:
        assert set(b"".join(built.contents(block))) == {POISON}


def build_model(name: str, layout: str) -> Built:
    vllm_config = make_vllm_config({}, max_model_len=1024, max_num_batched_tokens=1024)
    specs, cache = MODELS[name](), vllm_config.cache_config
    cache.kv_cache_layout, cache.mamba_cache_mode = layout, "align"
    for spec in specs.values():
        if hasattr(spec, "mamba_cache_mode"):
            cache.block_size = spec.block_size
    built = build(get_kv_cache_groups(vllm_config, specs), layout)
    check_supported(vllm_config, vllm_version(), (), built.config)
    for group, planned in zip(
        cache_groups(built.config), built.config.kv_cache_groups, strict=True
    ):
        assert group.is_scratch or planned.kv_cache_spec.prefix_cacheable
    return built


NOT_ALL = {
    "states": {"LHBNC"},
    "two pages": {"LHBNC", "BHLNC"},
    "padded": {"LHBNC", "BHLNC"},
    "DeepSeek V4": {"LBNHC"},
    "GLM-5.3": {"LBNHC"},
}
"""Layouts that vLLM has not, or that are refused, by kind."""


@pytest.mark.parametrize(
    ("kind", "tokens", "layout"),
    [
        *(("dense", tokens, layout) for tokens in (16, 32, 64, 128) for layout in LAYOUTS),
        *(
            (kind, 32, layout)
            for kind in ("windows", "latent", "states", "two pages", "padded")
            for layout in LAYOUTS
            if layout not in NOT_ALL.get(kind, ())
        ),
    ],
)
def test_blocks_come_back_as_they_were_stored(kind, tokens, layout):
    round_trip(build(groups_of(kind, tokens), layout))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in MODELS
        for layout in ("LBNHC", "BLHNC")
        if layout not in NOT_ALL.get(name, ())
    ],
)
def test_blocks_of_models_that_cannot_be_built_here_come_back(name, layout):
    built = build_model(name, layout)
    round_trip(built)
    assert describe_pages(make_vllm_config({}), built.config, built.caches)


@pytest.mark.parametrize("name", MODELS)
def test_slots_of_one_size_have_little_empty_room(name):
    """Else slots of several sizes would be worth their cost (`docs/design/cache_groups.md`)."""
    config = build_model(name, "BLHNC").config
    specs, groups = layer_specs(config), cache_groups(config)
    tokens, used, slots = 2048, 0, 0
    prefixes = PrefixMap(groups, 1, make_block_hash_with_group_id)
    for group, planned in zip(groups, config.kv_cache_groups, strict=True):
        count = len(prefixes.needed_slots(group, 0, tokens))
        used += count * sum(specs[layer].page_size_bytes for layer in planned.layer_names)
        slots += count
    assert used > 0.8 * slots * bytes_per_block(config)


def test_pages_of_scratch_take_no_room_in_a_slot():
    """Where vLLM gives it bytes of its own; else they are those of another group."""
    built = build_model("DeepSeek V4.1", "LBNHC")
    layout = describe_kv_caches(built.caches, built.config)
    regions = layer_regions(built.caches, layout)
    assert {name for name in regions if not regions[name]} == scratch_layers(built.config)
    with_scratch = replace(built.config, kv_cache_groups=built.config.kv_cache_groups[1:2])
    assert layout.block_bytes == sum(
        spec.page_size_bytes for spec in layer_specs(with_scratch).values()
    )


def test_states_over_attention_with_heads_outermost_are_refused():
    """A block's state would lie over the keys and values of two other blocks."""
    built = build(groups_of("states", 32), "LHBNC")
    with pytest.raises(UnsupportedError, match="overlap where no copy could be exact"):
        describe_kv_caches(built.caches, built.config)


@pytest.mark.parametrize("kernel_tokens", [16, 32])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name[0] != "B" and name[1] != "H"])
def test_kernel_blocks_that_are_smaller_than_the_managers(layout, kernel_tokens):
    built = build(groups_of("dense", 64), layout, kernel_tokens)
    assert {t.shape[0] for t in built.caches.values()} == {NUM_BLOCKS * 64 // kernel_tokens}
    round_trip(built)


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_blocks_outermost_are_one_run_over_all_layers(layout):
    """And a region for each layer, so that loads can come in waves."""
    built = build(groups_of("dense", 32), layout)
    regions = describe_kv_caches(built.caches, built.config).regions
    assert len(regions) == 3
    (run,) = runs_of(regions)
    assert run.page_bytes == run.block_stride_bytes == bytes_per_block(built.config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCALED)
def test_scales_per_token_and_head_travel_in_the_page(layout, name):
    """The views of the scales are vLLM's own; they lie between the keys and the values."""
    built = build([group("scaled", 2, attention_spec(32, **SCALED[name]))], layout)
    for cache in built.caches.values():
        implementation = SimpleNamespace(_k_scale_cache=None)
        TritonAttentionImpl._ensure_scale_caches(implementation, cache)
        scales = implementation._k_scale_cache, implementation._v_scale_cache
        assert [tuple(s.shape) for s in scales] == [(NUM_BLOCKS, 32, 2)] * 2
        assert all(cache.data_ptr() <= s.data_ptr() and (s == 1.0).all() for s in scales)
    round_trip(built)


def latent_of(state_bytes: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        state_content_bytes=state_bytes,
    )


def attention_of(state_bytes: int, mode: str) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=32,
        num_kv_heads=2,
        head_size=128,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode[mode],
        state_content_bytes=state_bytes,
    )


PACKED_TYPES = {
    "fp8_ds_mla": latent_of(656),
    "nvfp4_ds_mla": latent_of(352),
    "nvfp4": attention_of(2 * (64 + 8), "NVFP4"),
    "int4_per_token_head": attention_of(2 * (64 + 4), "INT4_PER_TOKEN_HEAD"),
    "turboquant_3bit_nc": attention_of(50 + 52, "TURBOQUANT_3BIT_NC"),
}
"""Specs of layers, with the bytes of a token and head as vLLM's backends have them."""


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("name", PACKED_TYPES)
def test_blocks_of_packed_types_come_back_unpacked(name, layout):
    built = build([group("packed", 2, PACKED_TYPES[name])], layout)
    described = describe_kv_caches(built.caches, built.config, packs=True)
    assert [region.packing for region in described.regions] == [None] * len(described.regions)
    round_trip(built)


def test_a_layout_that_puts_two_blocks_on_the_same_bytes_is_refused():
    built = build(groups_of("dense", 32), LAYOUTS[0])
    name, cache = next(iter(built.caches.items()))
    overlapping = cache.as_strided(cache.shape, (cache.stride(0) // 2, *cache.stride()[1:]))
    with pytest.raises(UnsupportedError, match="neighbouring blocks would overlap"):
        describe_kv_caches({**built.caches, name: overlapping}, built.config)


def packed_bytes(built: Built) -> tuple[int, int]:
    """Return the bytes of a block's regions that are packed, and of those that are not."""
    regions = describe_kv_caches(built.caches, built.config, packs=True).regions
    packed = sum(region.page_bytes for region in regions if region.packing is not None)
    return packed, sum(region.page_bytes for region in regions) - packed


def channels_of_columns(built: Built, heads: int, tokens: int) -> dict[int, set[int]]:
    """Return for each column of a block's first packed region the channels that it has.

    A channel is a head's, of keys or of values; tokens do not count.
    """
    layout = describe_kv_caches(built.caches, built.config, packs=True)
    found: dict[int, set[int]] = {}
    region = next(region for region in layout.regions if region.packing is not None)
    period, run = region.packing.period, region.packing.run
    for number, name in enumerate(sorted(region.tensors)):
        cache = built.caches[name]
        page = cache[:1]
        channel = torch.zeros_like(page, dtype=torch.int64)
        token_dim = -2
        for dim in range(1, page.dim()):
            if dim - page.dim() != token_dim:
                shape = [-1 if at == dim else 1 for at in range(page.dim())]
                channel = channel * page.shape[dim] + torch.arange(page.shape[dim]).view(shape)
        assert page.shape[token_dim] == tokens
        offsets = torch.zeros_like(page, dtype=torch.int64)
        for dim in range(1, page.dim()):
            shape = [-1 if at == dim else 1 for at in range(page.dim())]
            offsets = offsets + torch.arange(page.shape[dim]).view(shape) * page.stride(dim)
        groups = (offsets + (cache.data_ptr() - region.address) // 2).flatten() // 8
        inside = (groups >= 0) & (groups < region.page_bytes // 16)
        columns = (groups // run * period + groups % period)[inside].tolist()
        for column, one in zip(columns, channel.flatten()[inside].tolist(), strict=True):
            found.setdefault(column, set()).add((number << 32) + one)
    return found


@pytest.mark.parametrize(("heads", "tokens"), [(2, 128), (16, 16), (4, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_eight_channels_are_packed_together(layout, heads, tokens):
    """Over all tokens, and with no others: also where there are as many heads as tokens."""
    spec = attention_spec(tokens, num_kv_heads=heads)
    built = build([group("full", 2, spec)], layout)
    if layout == "LHBNC" and heads > 2:
        assert packed_bytes(built)[0] == 0, "the pages of a head are too small"
        return
    channels = channels_of_columns(built, heads, tokens)
    assert {len(found) for found in channels.values()} == {8}
    assert len(set().union(*channels.values())) == 8 * len(channels)


@pytest.mark.parametrize(
    ("kind", "packs"), [("dense", True), ("windows", True), ("latent", True), ("states", False)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_blocks_come_back_as_they_were(kind, layout, packs):
    if layout in NOT_ALL.get(kind, ()):
        pytest.skip("this kind has no such layout")
    built = build(groups_of(kind, 128), layout)
    packed, raw = packed_bytes(built)
    assert (packed > 0, raw > 0) == (packs, not packs)
    round_trip(built, packs=True)


def test_nothing_of_another_type_or_of_small_pages_is_packed():
    for spec in (
        attention_spec(128, dtype=torch.float16),
        attention_spec(128, dtype=torch.float32),
        attention_spec(16),
        attention_spec(32, **SCALED["int8_per_token_head"]),
    ):
        built = build([group("full", 2, spec)], LAYOUTS[0])
        layout = describe_kv_caches(built.caches, built.config, packs=True)
        assert layout == describe_kv_caches(built.caches, built.config)
        said = describe_unpacked(built.caches, layout)
        assert "pages of 16 KiB or more" in said


def pages(
    kind: str,
    layout: str,
    kernel_tokens: int | None = None,
    *,
    packs: bool = False,
    tokens: int = 64,
    **backends: type[AttentionBackend],
) -> str:
    built, config = build(groups_of(kind, tokens), layout, kernel_tokens), make_vllm_config({})
    config.compilation_config.static_forward_context = {
        name.replace("_", "."): SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        for name, backend in backends.items()
    }
    return describe_pages(config, built.config, built.caches, packs=packs)


def test_slots_in_which_values_lie_elsewhere_are_told_apart():
    kinds = ["dense", "windows", "latent", "states", "two pages", "padded"]
    made = [
        *(pages("dense", layout) for layout in LAYOUTS),
        *(pages(kind, LAYOUTS[0]) for kind in kinds[1:]),
        pages("dense", LAYOUTS[0], 16),
        pages("dense", LAYOUTS[0], full_0=TritonAttentionBackend),
        pages("dense", LAYOUTS[0], full_1=TritonAttentionBackend),
    ]
    assert len(set(made)) == len(made)


def test_packed_slots_are_told_apart_from_others_and_by_their_format(monkeypatch):
    def told(packs: bool, kind: str = "dense") -> str:
        return pages(kind, LAYOUTS[0], packs=packs, tokens=128)

    plain, packed = told(False), told(True)
    assert plain != packed == told(True)
    assert told(True, "states") == told(False, "states"), "nothing of it is packed"
    monkeypatch.setattr("kv_offload.engines.vllm.model.layout.FORMAT_VERSION", 99)
    assert told(False) == plain
    assert told(True) not in (plain, packed)


@pytest.mark.parametrize("kind", ["dense", "windows", "latent", "states", "two pages"])
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_how_many_blocks_there_are_and_where_does_not_change_a_slot(kind, layout, monkeypatch):
    if layout in NOT_ALL.get(kind, ()):
        pytest.skip("not served")
    before = pages(kind, layout)
    for blocks in (NUM_BLOCKS, NUM_BLOCKS + 4):
        monkeypatch.setitem(globals(), "NUM_BLOCKS", blocks)
        assert pages(kind, layout) == before
