"""A cache of another size in miniature: a sample of the blocks, in as small a share of the slots.

C. Waldspurger et al., "Cache Modeling and Optimization using MiniSim Simulations", USENIX ATC
2017: a cache that sees a random share of the keys, and has that share of the slots, has nearly the
hit ratio of the whole, whatever its policy. Sampling is SHARDS's (FAST 2015): a key is always in
the sample or never.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slot_refcounts import distinct
from kv_offload.cache.slots import NO_SLOTS, Key, Run

RUN_SHARE = 4
"""A run of blocks, of which one at most is sampled, has this part of the length before it.

On the conversation trace of Mooncake (FAST'25) errors of the estimate were 1.3 points at most with
runs as long as all before them, since requests that part within a run are sampled alike; 0.9 with
a quarter, in four samples at each of five sizes (November 2026)."""


def sample_blocks(hashes: Sequence[bytes], rarity_bits: int, step: int = 1) -> list[int]:
    """Return the places of the sampled blocks of a prompt, each block with chance 1/2**rarity_bits.

    `hashes` name prefixes, and every `step`-th one a block. Prompts that share a prefix have the
    same sample of it. Blocks that follow each other are cut into runs, with at most one of a run in
    the sample, so that a long prompt has nearly as many as it should. Takes a time that grows with
    the logarithm of the prompt until runs have 2**rarity_bits blocks.
    """
    blocks, places = len(hashes) // step, []
    others = (1 << rarity_bits) - 1
    for first, length, chooser in _runs(rarity_bits):
        if first >= blocks:
            break
        # The low bits choose a dict of `KeyMap`.
        at = (hash(hashes[chooser * step - 1]) >> 16) & others
        if at < length and first + at < blocks:
            places.append(first + at)
    return places


def _runs(rarity_bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs: first block, length, and how many blocks lie before the end of its chooser."""
    growing = _growing_runs(rarity_bits)
    yield from growing
    rarity = 1 << rarity_bits
    last, length, _ = growing[-1]
    for first in itertools.count(last + length, rarity):
        yield first, rarity, first + (rarity == 1)


@functools.cache
def _growing_runs(rarity_bits: int) -> list[tuple[int, int, int]]:
    """Return the runs up to the first that is as long as runs become.

    What lies before a run chooses its place; a run of one block chooses for itself.
    """
    runs, first, length = [], 0, 0
    while length < 1 << rarity_bits:
        length = min(max(1, first // RUN_SHARE), 1 << rarity_bits)
        runs.append((first, length, first + (length == 1)))
        first += length
    return runs


class SampledRequest(NamedTuple):
    """The sampled keys of a request, in prefix order, of which those from `first` are looked up."""

    keys: Sequence[Key]
    first: int = 0
    prompt_tokens: int = 0


class MiniSim:
    """A cache of `slots` slots that is given sampled keys, and stores and loads nothing."""

    def __init__(self, policy: str, slots: int) -> None:
        """Raises `CapacityError` for fewer slots than 1."""
        self.manager = CacheManager(make_policy(policy, slots))

    def serve(self, requests: Sequence[SampledRequest]) -> list[int]:
        """Serve requests; return how many keys of each hit, from its first that is looked up on.

        A hit ends at the first key that has no slot. Keys before the first are used, too. Serving
        several at once is much faster; they are taken for served in turn, but what they load is
        used before anything is stored.
        """
        manager = self.manager
        numbers = iter(manager.slot_numbers([key for one in requests for key in one.keys]))
        hits: list[int] = []
        used: list[int] = []
        new: dict[Key, None] = {}
        runs: list[Run] = []
        along: list[int] = []
        for keys, first, prompt_tokens in requests:
            slots = [*itertools.islice(numbers, len(keys))]
            end = first
            while end < len(keys) and (slots[end] >= 0 or keys[end] in new):
                end += 1
            hits.append(end - first)
            used += [slot for slot in slots[first:end] if slot >= 0]
            before = len(new)
            for at in (*range(first), *range(end, len(keys))):
                if slots[at] >= 0:
                    along.append(slots[at])
                else:
                    new[keys[at]] = None
            if len(new) > before:
                parent = keys[end - 1] if end else None
                runs.append(Run(len(new) - before, prompt_tokens, parent=parent))
        if used:
            manager.use(distinct(np.array(used, np.int32))[::-1])
        if new or along:
            known = np.array(along, np.int32) if along else NO_SLOTS
            stored, _ = manager.offer([*new], runs, known)
            manager.complete_store(stored)
        return hits

    def reset(self) -> None:
        """Forget all keys."""
        self.manager.reset()
