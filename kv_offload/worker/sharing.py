"""Host memory shared by ranks with equal KV bytes: how they agree on it, and which rank stores.

Every tensor-parallel rank of a model with latent attention computes the same latents, from its own
copy of the weights. So one arena serves the ranks of a pipeline stage: each maps and page-locks it,
stores a part of every job, and loads everything. Two things keep it correct:

- A slot becomes readable, or free, when *all* ranks have reported, shared or not. So no rank loads
  a slot that another still writes, or writes one that another still loads.
- A rank that learns of a completion sees its bytes (`kv_swap.memory.shared`). The report travels
  through the scheduler, and so does the load that follows.

vLLM makes the bytes equal: same kernels, same shapes, and reductions that give every rank the same
sums. If a last bit differed, a rank would read its neighbour's version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.arena_file import ArenaFiles
from kv_swap.memory.shared import SharedMemory

from kv_offload.messages import StoreJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharingRanks:
    """The ranks that hold the same KV bytes, including this one, in the same order on all."""

    index: int
    count: int
    gather: Callable[[Any], list[Any]]
    """Collects a value from each rank, in order. All must call it, and it waits for all."""

    def own_part(self, job: StoreJob) -> slice:
        """Return the rows of the pairs that this rank copies: an even part, which no other copies.

        Ranks take turns by job, because most jobs of a decode have one pair.
        """
        turn = (self.index + job.job_id) % self.count
        return slice(*(len(job.pairs) * part // self.count for part in (turn, turn + 1)))


ALONE = SharingRanks(0, 1, lambda value: [value])


def arena_bytes(cpu_bytes: int, num_ranks: int, sharing_ranks: int) -> int:
    """Return the bytes of one arena, which `sharing_ranks` of the ranks share."""
    return cpu_bytes * sharing_ranks // num_ranks


def open_shared_memory(
    sharing: SharingRanks,
    nbytes: int,
    layout: Any,
    numa_node: int | None,
    source: ArenaFiles | type[SharedMemory],
) -> SharedMemory | None:
    """Return memory from `source` that all sharing ranks can map; None on all if one cannot.

    `layout` describes the contents of a slot, and must be the same on all ranks. The memory's pages
    come in equal parts from the ranks' NUMA nodes, if given, because all devices read all of it.
    Waits for the slowest rank. The caller closes the handle. Raises `PinnedMemoryError` if there is
    only one rank and it cannot create memory.
    """
    memory: SharedMemory | None = None
    problem = ""
    if sharing.index == 0:
        try:
            memory = source.create(nbytes)
        except (PinnedMemoryError, OSError) as error:
            if sharing.count == 1:
                raise
            problem = str(error)
    name, first_layout = sharing.gather((memory and memory.name, layout))[0]
    if layout != first_layout:
        problem = f"its slots hold {layout}, those of rank 0 hold {first_layout}"
    elif sharing.index > 0 and name is not None:
        try:
            memory = source.attach(name, nbytes)
        except (PinnedMemoryError, OSError) as error:
            problem = str(error)
    if memory is not None and numa_node is not None:
        # Early enough: no rank allocates pages of any part before all have answered.
        memory.prefer_node(numa_node, sharing.index, sharing.count)
    problems = {rank: text for rank, text in enumerate(sharing.gather(problem)) if text}
    if memory is not None and not problems:
        return memory
    if memory is not None:
        memory.close()
    if sharing.index == 0:
        logger.warning(
            "kv-offload: %d tensor-parallel ranks hold the same KV bytes, but cannot share host "
            "memory: each keeps its own copy, in its part of cpu_bytes: %s",
            sharing.count,
            "; ".join(f"rank {rank}: {text}" for rank, text in problems.items()),
        )
    return None
