"""Host memory that ranks with equal KV bytes keep once: which ranks, how they agree, who stores.

Every tensor-parallel rank of a model with latent attention computes the same latents, from weights
that each has a copy of. So one arena serves the ranks of a pipeline stage: each maps and
page-locks it, each stores a part of every job, each loads everything. Two things keep it exact:

- A slot becomes readable, or free, when *all* ranks have reported, shared or not. So no rank loads
  what another still writes, and none writes what another still loads.
- A rank that learns of a completion sees its bytes (`kv_swap.memory.shared`). The report travels
  through the scheduler, and so does the load that follows.

vLLM makes the bytes equal: same kernels, same shapes, and reductions that give every rank the same
sums. If a last bit differed, a rank would read what its neighbour computed.
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
    """The ranks that hold the same KV bytes, this one included, in one order on all of them."""

    index: int
    count: int
    gather: Callable[[Any], list[Any]]
    """Return what each of them gives, in order. All must call it, and each waits for the others."""

    def own_part(self, job: StoreJob) -> slice:
        """Return the rows of the pairs that this rank copies; each is one rank's, parts are even.

        Ranks take turns by job: most jobs of a decode have one pair.
        """
        turn = (self.index + job.job_id) % self.count
        return slice(*(len(job.pairs) * part // self.count for part in (turn, turn + 1)))


ALONE = SharingRanks(0, 1, lambda value: [value])


def arena_bytes(cpu_bytes: int, num_ranks: int, sharing_ranks: int) -> int:
    """Return the bytes of one arena, of which every `sharing_ranks` of the ranks have one."""
    return cpu_bytes * sharing_ranks // num_ranks


class Memfds:
    """Makes memory that ends with its processes."""

    def create(self, nbytes: int, num_peers: int) -> tuple[str, SharedMemory]:
        """Make memory, and return the name under which the other ranks attach."""
        memory = SharedMemory.create(nbytes)
        return memory.name, memory

    def attach(self, name: str, nbytes: int) -> SharedMemory:
        """Return the memory that another rank has created."""
        return SharedMemory.attach(name, nbytes)


def open_shared_memory(
    sharing: SharingRanks,
    nbytes: int,
    layout: Any,
    numa_node: int | None,
    source: Memfds | ArenaFiles,
) -> tuple[str, SharedMemory | None]:
    """Return memory that all sharing ranks can map, and its name; None on all if one cannot.

    `layout` says what is where in a slot; all must say the same. The memory's pages come in equal
    parts from the ranks' NUMA nodes, where those are given: all devices read all of it. Waits for
    the slowest rank. The caller closes the handle. Raises `PinnedMemoryError` if a single rank
    cannot have any.
    """
    memory: SharedMemory | None = None
    name, problem = "", ""
    if sharing.index == 0:
        try:
            name, memory = source.create(nbytes, sharing.count - 1)
        except (PinnedMemoryError, OSError) as error:
            if sharing.count == 1:
                raise
            problem = str(error)
    offers = sharing.gather((name, memory is not None, layout))
    name, offered, first_layout = offers[0]
    if layout != first_layout:
        problem = f"its slots hold {layout}, those of rank 0 hold {first_layout}"
    elif sharing.index > 0 and offered:
        try:
            memory = source.attach(name, nbytes)
        except (PinnedMemoryError, OSError) as error:
            problem = str(error)
    if memory is not None and numa_node is not None:
        # Before any peer gives pages to any part, which none does before all have answered.
        memory.prefer_node(numa_node, sharing.index, sharing.count)
    problems = {rank: text for rank, text in enumerate(sharing.gather(problem)) if text}
    if memory is not None and not problems:
        return name, memory
    if memory is not None:
        memory.close()
    if sharing.index == 0:
        logger.warning(
            "kv-offload: %d tensor-parallel ranks hold the same KV bytes, but cannot share host "
            "memory: each keeps its own copy, in its part of cpu_bytes: %s",
            sharing.count,
            "; ".join(f"rank {rank}: {text}" for rank, text in problems.items()),
        )
    return "", None
