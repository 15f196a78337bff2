"""Which rule each cache group follows, and which ranks hold the same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.start.groups import (
    cache_groups,
    ranks_with_equal_bytes,
)
from kv_offload.engines.vllm.versions import vllm_version
from tests.support.configurations import make_kv_cache_config, make_spec

pytestmark = pytest.mark.filterwarnings("default")

FULL, WINDOW = CacheGroup(0, 4), CacheGroup(1, 4, 6)
CHUNKS = CacheGroup(1, 4, chunk_tokens=8)
STATE = CacheGroup(1, 4, holds_state=True)

names_some = pytest.mark.skipif(
    vllm_version() < (0, 32), reason="this vLLM names all blocks of a window by default"
)

# -- groups ------------------------------------------------------------------------------------


def test_groups_keep_the_order_of_the_block_tables() -> None:
    groups = (
        CacheGroup(0, 8),
        CacheGroup(1, 4, 6),
        CacheGroup(2, 4, 13),
        CacheGroup(3, 4, chunk_tokens=8),
        CacheGroup(4, 4, holds_state=True),
    )
    assert cache_groups(make_kv_cache_config(groups, 40)) == groups


@names_some
def test_windows_of_which_vllm_names_some_blocks() -> None:
    groups = (FULL, dataclasses.replace(WINDOW, retention_tokens=0))
    assert cache_groups(make_kv_cache_config(groups, 40)) == groups


def test_blocks_hold_the_tokens_of_all_context_parallel_ranks() -> None:
    groups = (CacheGroup(0, 8), CacheGroup(1, 4))
    expected = (CacheGroup(0, 16), CacheGroup(1, 8))
    config = make_kv_cache_config(groups, 40)
    assert cache_groups(config, 2) == expected
    whole = SimpleNamespace(block_size=4, dcp_sharded=False)
    config.kv_cache_groups[1] = SimpleNamespace(layer_names=["layer.1"], kv_cache_spec=whole)
    assert cache_groups(config, 2) == (CacheGroup(0, 16), CacheGroup(1, 4))


def test_all_groups_count_as_those_of_a_draft_head() -> None:
    """vLLM names the groups of a head's layers only where it can tell them from the model's."""
    config = make_kv_cache_config((FULL, WINDOW), 40)
    groups = cache_groups(config, draft_head=True)
    assert all(group.sees_next_token for group in groups)
    assert [dataclasses.replace(group, sees_next_token=False) for group in groups] == [FULL, WINDOW]


def uniform(*windows: int | None, chunks: Sequence[int] = ()) -> tuple[CacheGroup, ...]:
    """Return the groups of a model whose layers, of all these rules, are in one group."""
    config = make_kv_cache_config([FULL], 40)
    members = [make_spec(4, window) for window in windows]
    members += [make_spec(4, chunk_tokens=chunk) for chunk in chunks]
    specs = {f"layer.{i}": spec for i, spec in enumerate(members)}
    (group,) = config.kv_cache_groups
    group.layer_names = list(specs)
    group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
    return cache_groups(config)


def test_the_largest_window_of_a_group_covers_the_others() -> None:
    assert uniform(6, 30, 13) == (CacheGroup(0, 4, 30),)


def test_a_layer_with_full_attention_needs_all_blocks_of_its_group() -> None:
    assert uniform(6, None, 30) == (CacheGroup(0, 4, None),)


def test_chunks_of_one_size_stay_chunks() -> None:
    assert uniform(chunks=(8, 8)) == (CacheGroup(0, 4, chunk_tokens=8),)


def test_layers_that_read_by_different_rules_need_all_blocks() -> None:
    assert uniform(chunks=(8, 12)) == (FULL,)
    assert uniform(6, chunks=(8,)) == (FULL,)


def test_a_full_attention_spec_that_notes_a_rule_keeps_all_blocks() -> None:
    """So vLLM describes windows and chunks where its hybrid manager is off: nothing is freed."""
    config = make_kv_cache_config([FULL], 40)
    config.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=2, dtype=torch.float32, sliding_window=6
    )
    assert cache_groups(config) == (FULL,)
    config.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=2, dtype=torch.float32, attention_chunk_size=8
    )
    assert cache_groups(config) == (FULL,)


# -- ranks with equal bytes ---------------------------------------------------------------------


def latent(**more: Any) -> MLAAttentionSpec:
    if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__:
        more = {"max_tp_shards": 1, **more}
    return MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, **more
    )


def dense() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)


def equal_ranks(*specs: Any, tensor: int = 4, decode_context: int = 1) -> int:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{i}"])
        for i, spec in enumerate(specs)
    ]
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor, decode_context_parallel_size=decode_context
    )
    return ranks_with_equal_bytes(parallel, SimpleNamespace(kv_cache_groups=groups))


def test_tensor_parallel_ranks_hold_the_same_latents() -> None:
    assert equal_ranks(latent()) == 4
    assert equal_ranks(latent(), latent()) == 4
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": latent()})
    assert equal_ranks(group) == 4
    assert equal_ranks(latent(), tensor=1) == 1


def test_ranks_that_may_differ_share_nothing() -> None:
    assert equal_ranks(dense()) == 1, "even of one head: what is left of it is not said"
    assert equal_ranks(latent(), dense()) == 1
    assert equal_ranks(latent(), decode_context=2) == 1
    assert equal_ranks() == 1
    if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__:
        assert equal_ranks(latent(max_tp_shards=None)) == 1
        assert equal_ranks(latent(), latent(max_tp_shards=2)) == 1
