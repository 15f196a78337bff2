"""Plans stores: looks at what a step has, chooses, takes slots and pins the GPU blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import PrefixMap
from kv_offload.cache.slots import NO_SLOTS
from kv_offload.engine import BlockPool
from kv_offload.messages import JobResult
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.budget import StoreBudget
from kv_offload.scheduler.stores.candidates import StoreCandidates
from kv_offload.scheduler.stores.choice import StoreChoice
from kv_offload.scheduler.stores.jobs import StoreJobs

logger = logging.getLogger(__name__)

MAX_STORE_SECONDS = 10.0
"""For how long a store may pin its GPU blocks; as long as a reset waits for it.

Where too few blocks are free, vLLM waits for stores rather than preempt a request. Stores are
planned to end within a few steps, so one that takes this long hangs, or its link is far slower than
was measured."""


class StorePlanner:
    """Stores blocks of requests that are scheduled in this step or have ended.

    A block is examined in a step that schedules its request and at whose end its tokens are
    computed, or after its request has ended with its tokens computed. If it is chosen it is pinned
    (`StoreJobs`). The block's own request does not write it either, since only full blocks of known
    tokens are examined.
    """

    def __init__(
        self,
        prefixes: PrefixMap,
        manager: CacheManager,
        pool: BlockPool,
        num_ranks: int,
        budget: StoreBudget,
        statistics: Statistics,
        *,
        prompt_only: bool,
        after_uses: int,
    ) -> None:
        self._manager = manager
        self._pool = pool
        self._budget = budget
        self._statistics = statistics
        self.candidates = StoreCandidates(prefixes, prompt_only=prompt_only)
        self._choice = StoreChoice(prefixes, pool, self.candidates, statistics, after_uses)
        self.jobs = StoreJobs(manager, pool, num_ranks)

    def slots_left(self, soon_free_blocks: int = 0) -> int:
        """Return how many more slots may be chosen; see `pin_chosen`.

        None while a store that was given up has not ended: what is sent now stands behind it.
        """
        if self.jobs.abandoned:
            return 0
        free_blocks = self._pool.get_num_free_blocks() + soon_free_blocks
        return self._budget.slots_left(self.jobs.pinned_blocks, free_blocks)

    def pin_chosen(self, soon_free_blocks: int = 0) -> None:
        """Choose from the candidates, take slots for what is new and pin the blocks that got one.

        `soon_free_blocks` counts blocks that the engine frees right after this call.

        What is known of the same prefixes goes along: it is used again, and must not be evicted for
        its own tail.
        """
        spans, keys = self.candidates.take()
        if not spans:
            return
        # Lists, not arrays: mostly decodes have filled a block each, and nothing is known of them.
        slots = self._manager.slot_numbers(keys)
        chosen = self._choice.choose(spans, keys, slots, self.slots_left(soon_free_blocks))
        if not chosen.new and not chosen.along:
            return
        along = np.array(chosen.along, np.int32) if chosen.along else NO_SLOTS
        stored = self._manager.prepare_store(list(chosen.new), along)
        taken = len(stored)
        self._statistics.skipped("pool_busy", len(chosen.new) - taken)
        if taken:
            self._budget.count_planned(taken)
            self.jobs.pin(stored, chosen.blocks[:taken])

    def give_up_late(self) -> None:
        """Give up the stores that have run for `MAX_STORE_SECONDS`, so that nobody waits longer."""
        late = self.jobs.abandon(time.monotonic() - MAX_STORE_SECONDS)
        if late:
            logger.error(
                "kv-offload: gave up %d stores that did not end in %.0f s, and released their GPU "
                "blocks. Nothing is stored until they have ended",
                late,
                MAX_STORE_SECONDS,
            )

    def complete(self, results: Mapping[int, JobResult]) -> None:
        """Take the ranks' reports of stores."""
        self._statistics.skipped("copy_failed", self.jobs.complete(results))

    def fail(self, results: Mapping[int, JobResult]) -> None:
        """Take reports of stores of which nobody can say that they went well."""
        self.complete({job_id: replace(result, ok=False) for job_id, result in results.items()})
