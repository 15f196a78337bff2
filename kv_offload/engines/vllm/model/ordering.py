"""Decides whether a load may start while forward passes of earlier steps are still running.

vLLM launches a step while the previous one runs. A load that waited for that forward pass could
lose a whole step's time. It need not wait if no launched step touches the blocks that the engine
gives out. The following can touch a block on the device; each item says why it has ended before the
block is given to a request:

- *Forward passes of the previous owner.* With several steps in flight and a connector that can
  load, vLLM keeps the blocks of finished, aborted or preempted requests until it has the output of
  every step planned by then (`defer_block_free`).
- *Forward passes that read it before a window or chunk moved on.* vLLM frees such blocks by the
  tokens whose output it has, not by planned tokens (`remove_skipped_blocks`).
- *Zeroing and copy-on-write of earlier steps.* They touch blocks of requests in those steps, so the
  first rule holds. vLLM keeps the sources of copies for as long.
- *Zeroing and copy-on-write of the same step.* The runner queues them before the forward pass; in
  such a step, loads start after that, and wait (`changes_blocks`).
- *Stores.* The scheduler pins their sources until they have ended on all ranks.
- *Loads of a previous owner.* vLLM keeps their blocks until the load is reported.
- *Zeroing after a failed load.* The rank queues it itself, and its later loads wait for it.
- *Resets.* They drain all copies and free the blocks of steps in flight at once. Before that, each
  rank makes its later loads wait for those steps (`reset_prefix_cache.blocks_freed_at_once`).
- *Padding of graphs and warm-up.* It writes nothing, or the null block, which is never given out.

The first rule has two exceptions: a draft model may write KV after the output of its step was
copied, and states are copied between blocks outside a step's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_offload.cache.prefix import CacheGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def gives_idle_blocks(vllm_config: VllmConfig, groups: Sequence[CacheGroup]) -> bool:
    """Return whether no launched step touches a block that the engine gives to a request.

    False if this is unknown, or if only one step is in flight, since nothing would be gained.
    Inside a MultiConnector the answer does not matter: loads start too late.
    """
    return (
        vllm_config.max_concurrent_batches > 1
        and vllm_config.kv_transfer_config.is_kv_consumer
        and vllm_config.speculative_config is None
        and not any(group.holds_state for group in groups)
    )
