"""Workarounds for bugs of vLLM in its own prefix cache or with any connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kv_offload.engines.vllm.locate import connectors_in
from kv_offload.engines.vllm.model.groups import scratch_layers
from kv_offload.engines.vllm.requests import queue_without_blocks


def clear_uncomputed_hashes(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `Scheduler._preempt_request` and clear the hashes of blocks that no step computes.

    vLLM hashes the full blocks of a step when it allocates them. With priority scheduling, it may
    then preempt the request in the same step, which frees these blocks with their hashes. The next
    lookup of that prefix would hit the blocks' old contents, and the plugin would store these in
    host memory, where they outlive a reset. Blocks of steps in flight count as computed.
    """
    uncomputed = set(_hashed_uncomputed(self.kv_cache_manager, request))
    if uncomputed:
        self.kv_cache_manager.evict_blocks(uncomputed)
    return original(self, request, *args, **kwargs)


def _hashed_uncomputed(kv_cache_manager: Any, request: Any) -> Iterator[int]:
    """Yield a request's blocks that have a hash although no step computes their tokens."""
    blocks = kv_cache_manager.block_pool.blocks
    tables = kv_cache_manager.get_block_ids(request.request_id)
    managers = kv_cache_manager.coordinator.single_type_managers
    for manager, table in zip(managers, tables, strict=True):
        for block_id in table[request.num_computed_tokens // manager.block_size :]:
            if blocks[block_id].block_hash is not None:  # the null block has none
                yield block_id


def continue_session(
    original: Callable[..., Any], self: Any, session: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `Scheduler._update_request_as_session` and continue from what was computed.

    A session drops an answer's last token and continues from its computed tokens. In 0.31, a block
    that this token filled keeps its hash, by which other requests then hit the KV of the token that
    replaced it. In 0.31 and 0.32, drafts accepted after the end of an answer count as computed.
    Pending drafts of the answer's next token would be scheduled with the new part.

    The state after the last token kept may be lost: a step in flight at the end of the answer has
    overwritten it, or it is stored after a draft's state, where no runner looks. With drafts,
    that step also overwrites tokens in a ring that are not compressed yet. So a session of a model
    with states, or with rings and drafts, gives up its blocks and is looked up again, as after a
    preemption. It does not count as preempted: after a load, runner V1 would keep the prompt
    without the new part.
    """
    session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens)
    del session.block_hashes[session.num_computed_tokens // self.hash_block_size :]
    result = original(self, session, *args, **kwargs)
    session.num_preemptions = 0
    session.spec_token_ids, session.is_prefill_chunk = [], True  # a prefill chunk gets no drafts
    overwrites_rings = self.num_spec_tokens and scratch_layers(self.kv_cache_config)
    if (self.has_mamba_layers or overwrites_rings) and (
        connectors := [*connectors_in(self.connector)]
    ):
        self._free_request_blocks(session)
        session.num_computed_tokens = 0
        queue_without_blocks(self, {session.request_id})
        for connector in connectors:
            connector.restarted_sessions.add(session.request_id)
    return result


def name_written_states(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `MambaManager._cache_partial_tail_block`, so that only written states have hashes.

    In 0.31, with a backend that keeps a state within a prefill by itself, vLLM hashes two others.
    One is the state at the end of a prompt, during the next step, which overwrites it (asynchronous
    scheduling). The other is any content of the blocks reserved for a request's drafts, after a
    later chunk of the prompt has passed them.
    """
    computed = request.num_computed_tokens
    checkpoint = self._checkpoints.get(request.request_id)
    if checkpoint is not None and computed:
        table = self.req_to_blocks[request.request_id]
        passed = table[computed // self.block_size : checkpoint[1]]
        self.block_pool.evict_blocks({block.block_id for block in passed})
    # After a preemption, the answer so far is computed like a prompt.
    if computed >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return None
    return original(self, request, *args, **kwargs)


def chunk_after_hit(
    original: Callable[..., int],
    self: Any,
    request: Any,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """Run around `Scheduler._mamba_block_aligned_split`, for hits that end inside a block.

    The chunk after such a hit ends with the block. vLLM lets a prompt's last chunk run past the end
    of the block if the backend keeps the state at the prompt's last hash by itself. The state at
    the end of the block is then lost, but vLLM hashes the block, which has the state at the
    beginning of the chunk. The next hit would continue from that state.

    vLLM copies the block of the hit before the step's forward. If this step only computes the
    block, for a request whose load has ended or that was preempted, the hit waits for the next step
    (0 tokens).
    """
    known = num_new_local_computed_tokens, num_external_computed_tokens
    block_tokens: int = self.cache_config.block_size
    start = request.num_computed_tokens + sum(known)
    inside = start % block_tokens
    if inside and num_new_local_computed_tokens and _is_being_computed(self, request, start):
        return 0
    count = original(self, request, num_new_tokens, *known)
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    return count if start >= prefill_end or not inside else min(count, block_tokens - inside)


def _is_being_computed(scheduler: Any, request: Any, end_tokens: int) -> bool:
    """Return whether a running request has yet to compute the same prefix up to `end_tokens`.

    Only with a block there: until then, it has not named one, and the hit is another's block.
    """
    last = end_tokens // scheduler.hash_block_size - 1
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return any(
        other.num_computed_tokens < end_tokens
        and other.block_hashes[last : last + 1] == request.block_hashes[last : last + 1]
        and any(
            len(manager.req_to_blocks[other.request_id]) * manager.block_size > end_tokens
            for manager in managers
        )
        for other in scheduler.running
    )
