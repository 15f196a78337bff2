"""What vLLM does wrong for its own prefix cache, or for any connector, is put right here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def unname_uncomputed(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `Scheduler._preempt_request`: names of blocks that nobody computes go.

    vLLM names the full blocks of a step's tokens when it allocates them. With priorities it may
    preempt a request that it has given tokens in the same step, and frees these blocks with their
    names. Whoever looks up that prefix next is served what lay there before, and the plugin would
    keep that in host memory, where it outlives a reset. Blocks of steps under way count as
    computed.
    """
    uncomputed = set(_named_uncomputed(self.kv_cache_manager, request))
    if uncomputed:
        self.kv_cache_manager.evict_blocks(uncomputed)
    return original(self, request, *args, **kwargs)


def _named_uncomputed(kv_cache_manager: Any, request: Any) -> Iterator[int]:
    """Yield a request's blocks that have a name and tokens that no step computes."""
    blocks = kv_cache_manager.block_pool.blocks
    tables = kv_cache_manager.get_block_ids(request.request_id)
    managers = kv_cache_manager.coordinator.single_type_managers
    for manager, table in zip(managers, tables, strict=True):
        for block_id in table[request.num_computed_tokens // manager.block_size :]:
            block = blocks[block_id]
            if block.block_hash is not None and not block.is_null:
                yield block_id


def forget_what_a_part_dropped(
    original: Callable[..., Any], self: Any, session: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `Scheduler._update_request_as_session`: what was dropped has no KV and no hash.

    A session goes on where it has computed, and drops the last token of an answer. Up to 0.31 a
    block that the token filled keeps its hash, by which others then get the KV of what came in its
    place. Of drafts that were accepted behind the end of an answer the KV counts as computed.
    """
    session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens)
    del session.block_hashes[session.num_computed_tokens // self.hash_block_size :]
    return original(self, session, *args, **kwargs)


def take_the_shortest_hit(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `Scheduler.schedule`: of hits of several groups the shortest counts.

    With states vLLM 0.26 takes the longest.
    """
    self.has_mamba_layers = False  # read nowhere else once the scheduler has been built
    return original(self, *args, **kwargs)


def take_a_hit_of_all_groups(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `KVCacheManager.get_computed_blocks_for_connector`: a hit is one of all groups.

    With states vLLM 0.27 takes that of full attention where the connector has tokens behind it.
    Ours brings the state, but not what a window reads before these tokens.
    """
    return *self.get_computed_blocks(request, *args, **kwargs), False


def observe_dictionaries(
    original: Callable[..., Any], self: Any, transfer_stats_data: Any, engine_idx: int = 0
) -> Any:
    """Run around `MultiKVConnectorPromMetrics.observe`: up to 0.31 figures may come as objects."""
    figures = transfer_stats_data.items()
    as_sent = {k: v if isinstance(v, dict) else {"data": v.data} for k, v in figures}
    return original(self, as_sent, engine_idx)
