"""Takes the names of blocks away that a preempted request was given and that nobody computes.

vLLM names the full blocks of a step's tokens when it allocates them, before any of them is
computed. With priorities it may preempt a request that it has given tokens in the same step, and
frees these blocks with their names. Whoever looks up that prefix next is served what lay there
before, and the plugin would keep that in host memory, where it outlives a reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def unname_uncomputed(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `Scheduler._preempt_request`.

    Of a request that is not in the step that is being planned, this finds no named block: those
    of steps under way count as computed.
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
