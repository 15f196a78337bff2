"""The model's cache groups, and the ranks that hold the same bytes, derived from vLLM's specs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.versions import layer_specs

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

LATENT_SPECS = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
FULL_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "HiddenStateCacheSpec"})
WINDOW_SPECS = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
CHUNK_SPEC = "ChunkedLocalAttentionSpec"
STATE_SPEC = "MambaSpec"
SPECS = FULL_SPECS | WINDOW_SPECS | {CHUNK_SPEC, STATE_SPEC}
"""Names of vLLM's KV-cache specs whose blocks are not written again once the pool has their hash.

Subclasses with other rules have other names and are refused, unless vLLM never gives their blocks
to another request (`is_scratch`). `docs/design/cache_groups.md` has a line for each."""

COMPRESSOR_STATES = ".compressor.state_cache"
"""Suffix of the names of DeepSeek V4's layers that keep tokens until a latent covers them."""

OVERLAPPING_WINDOW_TOKENS = 8
"""Window of such a layer if a latent covers 4 tokens: the 4 before them also go into it.

vLLM 0.31 to 0.33 has one other kind, whose window is the 128 tokens that a latent covers."""


def is_scratch(spec: Any) -> bool:
    """Return whether vLLM never serves a block of such a layer to another request.

    vLLM's own hits leave these blocks empty, too.
    """
    return not spec.prefix_cacheable


def scratch_layers(kv_cache_config: KVCacheConfig) -> frozenset[str]:
    """Return the layers whose blocks are not stored."""
    groups = kv_cache_config.kv_cache_groups
    scratch = [group for group in groups if is_scratch(group.kv_cache_spec)]
    return frozenset(name for group in scratch for name in group.layer_names)


def drops_last_block(vllm_config: VllmConfig) -> bool:
    """Return whether a hit drops its last matching block, because a draft head reads it.

    Such a head reads the model's hidden states and shares its cache groups. False with
    `disable_eagle_block_drop`: vLLM then keeps no window after the end of a hit, and the user
    accepts drafts from KV that may depend on another token.
    """
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.use_eagle_block_drop()


def engine_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[CacheGroup, ...]:
    """Return the cache groups of an engine's model."""
    return cache_groups(
        kv_cache_config,
        vllm_config.parallel_config.decode_context_parallel_size,
        drops_last_block=drops_last_block(vllm_config),
        lookahead_tokens=vllm_config.num_prefill_lookahead_tokens,
    )


def cache_groups(
    kv_cache_config: KVCacheConfig,
    decode_context_parallel_size: int = 1,
    *,
    drops_last_block: bool = False,
    lookahead_tokens: int = 0,
) -> tuple[CacheGroup, ...]:
    """Return the groups of a supported model in the order of its block tables.

    With decode context parallelism, a block has the tokens of all ranks' blocks; with only prefill
    context parallelism, every rank has all tokens. If vLLM drops a block for a draft head but marks
    no group as the head's, all groups count as the head's, as in vLLM. The KV of drafts depends on
    the `lookahead_tokens` after a token: MTP modules rewrite all but one of a step's last
    `lookahead_tokens`, so vLLM hashes their blocks in a later step.
    """
    specs = layer_specs(kv_cache_config)
    retention_tokens = kv_cache_config.prefix_cache_retention_interval
    of_head = [group.is_eagle_group for group in kv_cache_config.kv_cache_groups]
    groups = []
    for group_id, planned in enumerate(kv_cache_config.kv_cache_groups):
        members = [specs[name] for name in planned.layer_names] or _specs_of_other_stages(planned)
        split = all(spec.dcp_sharded for spec in members)
        ranks = decode_context_parallel_size if split else 1
        scratch = is_scratch(planned.kv_cache_spec)
        rule = {"is_scratch": True} if scratch else _reading_rule(members)
        if "window_tokens" in rule:
            rule["retention_tokens"] = retention_tokens
        block_tokens = planned.kv_cache_spec.block_size * ranks
        unnamed_tokens = max(0, lookahead_tokens - 1)
        may_be_of_head = of_head[group_id] or not any(of_head)
        # Draft heads have no states, so vLLM drops none for them.
        if drops_last_block and may_be_of_head and not {"holds_state", "is_scratch"} & rule.keys():
            rule["sees_next_token"] = True
        groups.append(CacheGroup(group_id, block_tokens, **rule, unnamed_tokens=unnamed_tokens))
    # With states, vLLM's own hits may end within a block.
    if not any(group.holds_state for group in groups):
        hit_tokens = math.lcm(*(group.block_tokens for group in groups))
        for planned, group in zip(kv_cache_config.kv_cache_groups, groups, strict=True):
            names = planned.layer_names
            if _keeps_open_latents([(name, specs[name]) for name in names], hit_tokens):
                groups[group.group_id] = CacheGroup(
                    group.group_id,
                    group.block_tokens,
                    chunk_tokens=group.window_tokens,
                    is_scratch=True,
                    unnamed_tokens=group.unnamed_tokens,
                )
    return tuple(groups)


def _keeps_open_latents(layers: Sequence[tuple[str, Any]], hit_tokens: int) -> bool:
    """Return whether layers keep only tokens of incomplete latents.

    A latent is made when the last of the tokens that it covers is computed. Hits end at multiples
    of `hit_tokens`. If a latent is complete at each of them, no query after a hit reads the tokens
    that such a layer keeps from before it.
    """
    return bool(layers) and all(
        name.endswith(COMPRESSOR_STATES)
        and type(spec).__name__ == "SlidingWindowMLASpec"
        and spec.sliding_window != OVERLAPPING_WINDOW_TOKENS
        and not spec.extra_retained_tokens
        and not hit_tokens % spec.sliding_window
        for name, spec in layers
    )


def _specs_of_other_stages(group: KVCacheGroupSpec) -> list[Any]:
    """Return the specs of a group that has no layer in this pipeline stage."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(per_layer.values()) if per_layer else [group.kv_cache_spec]


def _reading_rule(specs: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of `CacheGroup` with which each of a group's layers finds what it reads.

    Layers with different rules, or with chunks of different sizes, need all blocks. The largest
    window covers the others. vLLM also gives a hit the blocks of `extra_retained_tokens` before a
    window, and then caches them under their hashes, so they must be loaded too.
    """
    kinds = {type(spec).__name__ for spec in specs}
    if kinds <= WINDOW_SPECS:
        window = max(spec.sliding_window + spec.extra_retained_tokens for spec in specs)
        return {"window_tokens": window}
    if kinds == {STATE_SPEC}:
        return {"holds_state": True}
    chunks = {getattr(spec, "attention_chunk_size", None) for spec in specs}
    if kinds == {CHUNK_SPEC} and len(chunks) == 1:
        return {"chunk_tokens": chunks.pop()}
    return {"state_tokens": max(1, *(int(spec.tokens_per_state) for spec in specs))}


def ranks_with_equal_bytes(parallel: ParallelConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many tensor-parallel ranks hold the same KV bytes: all of them, or 1.

    `kv_cache_config` is that of a pipeline stage. With decode context parallelism, each rank has
    different tokens. All ranks compute the same latents from the same inputs, unless the spec says
    that it is split over ranks. Scratch layers are not stored, so they may differ.
    """
    scratch = scratch_layers(kv_cache_config)
    specs = [spec for name, spec in layer_specs(kv_cache_config).items() if name not in scratch]
    whole = all(type(spec).__name__ in LATENT_SPECS and spec.max_tp_shards == 1 for spec in specs)
    equal = specs and whole and parallel.decode_context_parallel_size == 1
    return int(parallel.tensor_parallel_size) if equal else 1
