"""Decides whether a load may start while forward passes of earlier steps are still running.

vLLM launches a step while the one before it runs. A load that waited for that forward pass would
lose up to the time of a whole step. It need not wait if the engine gives out only blocks that no
launched step touches. The following may touch a block on the device, each with the reason why it is
over before the block is given to a request:

- *Forward passes of the request that had it.* With several steps in flight and a connector that may
  load, vLLM keeps the blocks of finished, aborted or preempted requests until it has the output of
  every step that was planned by then (`defer_block_free`).
- *Forward passes that read it before a window or a chunk moved on.* vLLM frees such blocks by the
  tokens whose output it has, not by planned tokens (`remove_skipped_blocks`).
- *Zeroing and copy-on-write of earlier steps.* They touch blocks of requests that those steps run,
  so the first rule holds. The sources of copies are kept as long.
- *Zeroing and copy-on-write of the same step.* The runner queues them before the forward pass; in
  such a step loads start after that, and wait (`changes_blocks`).
- *Stores.* The scheduler pins their sources until they have ended on all ranks.
- *Loads of an earlier owner.* vLLM keeps their blocks until the load was reported.
- *Zeroing after a failed load.* The rank queues it itself, and its later loads wait for it.
- *Resets.* They drain all copies, and free at once the blocks that steps in flight use. Before
  that, each rank makes its later loads wait for those steps
  (`reset_prefix_cache.blocks_freed_at_once`).
- *Padding of graphs and warm-up.* It writes nothing, or the null block, which is never given out.

Two things break the first rule. A draft model may write KV after the output of its step was copied.
States are copied between blocks outside of a step's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_offload.cache.prefix import CacheGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def gives_idle_blocks(vllm_config: VllmConfig, groups: Sequence[CacheGroup]) -> bool:
    """Return whether no launched step touches a block that the engine gives to a request.

    False if this is unknown, and if only one step is in flight, because then there is nothing to
    gain. Inside a MultiConnector loads start too late for it to matter.
    """
    return (
        vllm_config.max_concurrent_batches > 1
        and vllm_config.kv_transfer_config.is_kv_consumer
        and vllm_config.speculative_config is None
        and not any(group.holds_state for group in groups)
    )
