"""Which rule each cache group follows, and which ranks hold the same bytes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.models.deepseek_v4.compressor import CompressorMetadata, CompressorStateCache
from vllm.models.deepseek_v4.cpu import cpu_compressor
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
from kv_offload.engines.vllm.model.groups import (
    COMPRESSOR_STATES,
    cache_groups,
    ranks_with_equal_bytes,
)
from tests.support.configurations import (
    make_kv_cache_config,
    make_spec,
    make_vllm_config,
    set_layers,
)
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


STATES = "0.attn" + COMPRESSOR_STATES


def open_latents(latent_tokens: int, *others: CacheGroup, name: str = STATES, **more: Any) -> Any:
    """Return the groups of a model that keeps tokens until a latent covers so many."""
    config = make_kv_cache_config((CacheGroup(0, 8), *others), 40)
    spec = spec_of(SlidingWindowMLASpec, sliding_window=latent_tokens, **more)
    config.kv_cache_groups.append(KVCacheGroupSpec([name], spec))
    return cache_groups(config)[-1]


def test_tokens_of_latents_that_a_hit_completes_are_not_stored():
    """vLLM's hits end at multiples of 8 tokens here, as ours do."""
    assert open_latents(4) == CacheGroup(1, 4, chunk_tokens=4, is_scratch=True)
    others = (CacheGroup(1, 32), CacheGroup(2, 4, 9))
    assert open_latents(32, *others) == CacheGroup(3, 4, chunk_tokens=32, is_scratch=True)


@pytest.mark.parametrize(
    ("latent_tokens", "others", "more"),
    [
        # Latents of 4 tokens are also made from the 4 tokens before.
        (8, (), {}),
        # A hit may end within a latent.
        (16, (), {}),
        (12, (CacheGroup(1, 4, 9),), {}),
        (4, (dataclasses.replace(STATE, group_id=1),), {}),
        # Several MTP modules compute the last tokens of a hit again.
        (4, (), {"extra_retained_tokens": 2}),
        # Another layer may read its window from any token on.
        (4, (), {"name": "0.attn.window"}),
    ],
)
def test_tokens_that_a_latent_after_a_hit_may_be_made_from_are_stored(latent_tokens, others, more):
    group = open_latents(latent_tokens, *others, **more)
    window = latent_tokens + more.get("extra_retained_tokens", 0)
    assert group == CacheGroup(1 + len(others), 4, window)


@pytest.mark.parametrize(("ratio", "head_size"), [(4, 512), (4, 128), (128, 512)])
def test_no_latent_after_a_hit_is_made_from_tokens_that_are_not_stored(ratio, head_size):
    """Each token of V4's own compressor gathers the rows that its latent is made from.

    So the rules above fit the layers of the installed vLLM: their names, kinds and windows.
    """
    config = make_vllm_config({})
    with set_current_vllm_config(config):
        states = CompressorStateCache(
            2 * (1 + (ratio == 4)) * head_size, torch.float32, ratio, STATES
        )
    spec = states.get_kv_cache_spec(config)
    latents = MLAAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=512, dtype=torch.uint8, tokens_per_state=ratio
    )
    groups = [KVCacheGroupSpec(["0.kv"], latents), KVCacheGroupSpec([states.prefix], spec)]
    _, group = cache_groups(
        SimpleNamespace(kv_cache_groups=groups, prefix_cache_retention_interval=0)
    )
    # A request that has hit its first 256 tokens computes the 256 after these.
    positions = torch.arange(256, 512)
    found = gathered_tokens(ratio, head_size, spec.block_size, positions)
    complete = (positions + 1) % ratio == 0
    read_before = {token for token in found[complete].flatten().tolist() if token < 256}
    assert read_before == (set() if ratio == 128 else {252, 253, 254, 255})
    first = 256 if group.is_scratch else group.first_needed_token(256)
    assert all(first <= token for token in read_before)
    assert group.is_scratch == (not read_before)


def gathered_tokens(
    ratio: int, head_size: int, block_tokens: int, positions: torch.Tensor
) -> torch.Tensor:
    """Return the tokens that V4's compressor gathers for each position, `(positions, window)`.

    Its kernel, which not every CPU has, then compresses those of the positions that end a latent.
    """
    found = []
    compressor = SimpleNamespace(
        compress_ratio=ratio,
        overlap=ratio == 4,
        coff=1 + (ratio == 4),
        head_dim=head_size,
        ape=None,
        rms_norm_eps=0.0,
        _norm_weight_fp32=None,
        state_cache=SimpleNamespace(prefix="states", kv_cache=None),
        k_cache_prefix="latents",
        _static_forward_context={"latents": SimpleNamespace(kv_cache=torch.zeros(2, 64, 1))},
    )
    # The table has the request's blocks in order, so that rows are tokens.
    states = CompressorMetadata(
        block_table=torch.arange(512 // block_tokens, dtype=torch.int32)[None],
        slot_mapping=positions,
        block_size=block_tokens,
        token_to_req_indices=torch.zeros(len(positions), dtype=torch.int32),
    )
    latents = SimpleNamespace(slot_mapping=positions)
    kernels = {
        "save_partial_states_cpu": lambda *_: None,
        "compress_norm_rope_store_cpu": lambda _, rows, *__: found.append(rows),
        "compress_norm_rope_store_indexer_cpu": lambda _, rows, *__: found.append(rows),
    }
    context = SimpleNamespace(attn_metadata={"states": states, "latents": latents})
    with override_forward_context(context), mock.patch.multiple(cpu_compressor, **kernels):
        cpu_compressor.DeepseekV4CPUCompressor.forward(
            compressor,
            torch.zeros(len(positions), 2 * compressor.coff * head_size),
            positions,
            SimpleNamespace(cos_sin_cache=None),
        )
    (rows,) = found
    return rows


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
