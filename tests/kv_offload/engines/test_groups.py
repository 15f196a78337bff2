"""Which rule each cache group follows, and which ranks hold the same bytes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.model.groups import cache_groups, ranks_with_equal_bytes
from tests.support.configurations import make_kv_cache_config, make_spec, set_layers
from tests.support.planning import groups_of_stage
from tests.support.played_cases import CHUNKS, FULL, STATE, WINDOW


def test_groups_keep_the_order_of_the_block_tables():
    groups = (
        CacheGroup(0, 8),
        WINDOW,
        CacheGroup(2, 4, 13),
        dataclasses.replace(CHUNKS, group_id=3),
        dataclasses.replace(STATE, group_id=4),
    )
    config = make_kv_cache_config(groups, 40)
    assert cache_groups(config) == groups
    # vLLM names the groups of a head's layers only where it can tell them from the model's.
    # It has no states, and none waits for a proof.
    of_head = [dataclasses.replace(g, sees_next_token=not g.holds_state) for g in groups]
    assert cache_groups(config, drops_last_block=True) == tuple(of_head)


def test_where_vllm_names_the_groups_of_a_head_no_other_needs_a_proof():
    groups = (dataclasses.replace(FULL, sees_next_token=True), WINDOW)
    config = make_kv_cache_config(groups, 40)
    assert cache_groups(config, drops_last_block=True) == groups
    assert cache_groups(config) == (FULL, WINDOW)


def test_windows_of_which_vllm_names_some_blocks():
    groups = (FULL, dataclasses.replace(WINDOW, retention_tokens=0))
    assert cache_groups(make_kv_cache_config(groups, 40)) == groups


def test_blocks_hold_the_tokens_of_all_context_parallel_ranks():
    config = make_kv_cache_config((CacheGroup(0, 8), CacheGroup(1, 4)), 40)
    assert cache_groups(config, 2) == (CacheGroup(0, 16), CacheGroup(1, 8))
    config.kv_cache_groups[1] = KVCacheGroupSpec(["layer.1"], spec_of(dcp_sharded=False))
    assert cache_groups(config, 2) == (CacheGroup(0, 16), CacheGroup(1, 4))


def spec_of(kind: Any = FullAttentionSpec, **more: Any) -> Any:
    return kind(block_size=4, num_kv_heads=1, head_size=2, dtype=torch.float32, **more)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        # The largest window covers the others.
        ([make_spec(4, window) for window in (6, 30, 13)], CacheGroup(0, 4, 30)),
        # A layer with full attention needs all blocks.
        ([make_spec(4, window) for window in (6, None, 30)], FULL),
        ([make_spec(4, chunk_tokens=8)] * 2, CacheGroup(0, 4, chunk_tokens=8)),
        # Layers that read by different rules need all blocks.
        ([make_spec(4, chunk_tokens=chunk) for chunk in (8, 12)], FULL),
        ([make_spec(4, 6), make_spec(4, chunk_tokens=8)], FULL),
        ([spec_of(SlidingWindowMLASpec, sliding_window=9)], CacheGroup(0, 4, 9)),
        # vLLM gives a hit blocks for these tokens too, and knows them by hash afterwards.
        (
            [spec_of(SlidingWindowSpec, sliding_window=6, extra_retained_tokens=2)],
            CacheGroup(0, 4, 8),
        ),
        # A group of several tokens is compressed into one thing, which has no tokens of its own.
        ([spec_of(MLAAttentionSpec, tokens_per_state=4)], CacheGroup(0, 4, state_tokens=4)),
        ([spec_of(CircularBufferSpec)], CacheGroup(0, 4, is_scratch=True)),
        (
            [spec_of(SlidingWindowMLASpec, sliding_window=9, bounded_replay=True)],
            CacheGroup(0, 4, is_scratch=True),
        ),
        # So vLLM describes windows and chunks where its hybrid manager is off: nothing is freed.
        ([spec_of(sliding_window=6)], FULL),
        ([spec_of(attention_chunk_size=8)], FULL),
    ],
)
def test_a_group_keeps_what_any_of_its_layers_reads(members, expected):
    config = make_kv_cache_config([FULL], 40)
    set_layers(config, {f"layer.{i}": spec for i, spec in enumerate(members)})
    assert cache_groups(config) == (expected,)


@pytest.mark.parametrize("group", [WINDOW, CHUNKS, STATE])
def test_a_stage_without_a_layer_of_a_group_knows_its_rule(group):
    """The scheduler is given the groups of the first stage, as vLLM projects them."""
    config = make_kv_cache_config([FULL, group], 40)
    of_stage = {"layer.0": make_spec(FULL.block_tokens)}
    config.kv_cache_groups = groups_of_stage(config.kv_cache_groups, of_stage)
    assert [group.layer_names for group in config.kv_cache_groups] == [["layer.0"], []]
    assert cache_groups(config) == (FULL, group)
    specs = {"layer.1": config.kv_cache_groups[1].kv_cache_spec}
    uniform = UniformTypeKVCacheSpecs(block_size=group.block_tokens, kv_cache_specs=specs)
    config.kv_cache_groups[1].kv_cache_spec = uniform
    assert cache_groups(config) == (FULL, group)


def latent(**more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        **{"max_tp_shards": 1, **more},
    )


def equal_ranks(*specs: Any, tensor: int = 4, decode_context: int = 1) -> int:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{i}"])
        for i, spec in enumerate(specs)
    ]
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor, decode_context_parallel_size=decode_context
    )
    return ranks_with_equal_bytes(parallel, SimpleNamespace(kv_cache_groups=groups))


def test_tensor_parallel_ranks_hold_the_same_latents():
    assert equal_ranks(latent(), latent()) == 4
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": latent()})
    assert equal_ranks(group) == 4
    assert equal_ranks(latent(), tensor=1) == 1
    window = spec_of(SlidingWindowMLASpec, sliding_window=9, max_tp_shards=1)
    assert equal_ranks(latent(), window, spec_of(CircularBufferSpec)) == 4, "rings are not stored"


def test_ranks_that_may_differ_share_nothing():
    assert equal_ranks(spec_of()) == 1, "even of one head: what is left of it is not said"
    assert equal_ranks(latent(), spec_of()) == 1
    assert equal_ranks(latent(), decode_context=2) == 1
    assert equal_ranks() == equal_ranks(spec_of(CircularBufferSpec)) == 1
    assert equal_ranks(latent(max_tp_shards=None)) == 1
    assert equal_ranks(latent(), latent(max_tp_shards=2)) == 1
