"""Simulates a cache of another size on a sample of the blocks, with an equal share of the slots.

C. Waldspurger et al., "Cache Modeling and Optimization using MiniSim Simulations", USENIX ATC 2017:
a cache that sees a random share of the keys, and has that share of the slots, has nearly the hit
ratio of the whole cache, whatever its policy. The sampling follows SHARDS (FAST 2015): a key is
either always in the sample or never.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slots import NO_SLOTS, Key, Run, distinct

RUN_SHARE = 4
"""A run of blocks, at most one of which is sampled, is as long as the prompt before it divided by
this.

On the conversation trace of Mooncake (FAST'25) errors of the estimate were at most 1.3 points with
runs as long as everything before them, since requests that diverge within a run are sampled alike;
and 0.9 points with a quarter, in four samples at each of five sizes (November 2026)."""


def sample_blocks(hashes: Sequence[bytes], rarity_bits: int, step: int = 1) -> list[int]:
    """Return the indices of a prompt's sampled blocks, each with a chance of 1/2**rarity_bits.

    `hashes` name prefixes, and every `step`-th hash names a block. Prompts that share a prefix have
    the same sample of it. Consecutive blocks form runs, and at most one block of a run is sampled,
    so that a long prompt has nearly as many samples as it should. Takes time logarithmic in the
    prompt's length until runs have 2**rarity_bits blocks.
    """
    blocks, places = len(hashes) // step, []
    others = (1 << rarity_bits) - 1
    for first, length, chooser in _runs(rarity_bits):
        if first >= blocks:
            break
        # The low bits select a dict of `KeyMap`.
        at = (hash(hashes[chooser * step - 1]) >> 16) & others
        if at < length and first + at < blocks:
            places.append(first + at)
    return places


def _runs(rarity_bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs: first block, length, and the number of blocks up to their chooser's end."""
    growing = _growing_runs(rarity_bits)
    yield from growing
    rarity = 1 << rarity_bits
    last, length, _ = growing[-1]
    for first in itertools.count(last + length, rarity):
        yield first, rarity, first + (rarity == 1)


@functools.cache
def _growing_runs(rarity_bits: int) -> list[tuple[int, int, int]]:
    """Return the runs up to and including the first of maximum length.

    The hash of the prefix before a run chooses the sampled block in it; a run of one block chooses
    for itself.
    """
    runs, first, length = [], 0, 0
    while length < 1 << rarity_bits:
        length = min(max(1, first // RUN_SHARE), 1 << rarity_bits)
        runs.append((first, length, first + (length == 1)))
        first += length
    return runs


class SampledRequest(NamedTuple):
    """The sampled keys of a request in prefix order; those from `first` on are looked up."""

    keys: Sequence[Any]
    first: int = 0
    prompt_tokens: int = 0


class MiniSim:
    """A cache of `slots` slots that receives sampled keys but stores and loads no data."""

    def __init__(self, policy: str, slots: int) -> None:
        """Raises `CapacityError` if `slots` is less than 1."""
        self.manager = CacheManager(make_policy(policy, slots))

    def serve(self, requests: Sequence[SampledRequest]) -> list[int]:
        """Serve requests; return the number of keys hit in each, counted from its `first`.

        A hit ends at the first key that has no slot. Keys before `first` count as used, too.
        Serving several requests at once is much faster; they count as served one after another,
        except that all loads are counted before anything is stored.
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
            manager.policy.use(distinct(np.array(used, np.int32))[::-1])
        if new or along:
            known = np.array(along, np.int32) if along else NO_SLOTS
            stored, _ = manager.offer([*new], runs, known)
            manager.complete_store(stored)
        return hits

    def reset(self) -> None:
        """Drop all keys."""
        self.manager.reset()
