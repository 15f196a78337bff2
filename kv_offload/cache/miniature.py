"""A cache of another size in miniature: a sample of the blocks, in as small a share of the slots.

C. Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC
2017: a cache that sees a random share of the keys, and has that share of the slots, has nearly the
hit ratio of the whole, whatever its policy. Sampling is SHARDS's (FAST 2015): a key is always in
the sample or never.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slots import NO_SLOTS, Key, Run

RUN_SHARE = 4
"""A run of blocks, of which one at most is sampled, has this part of the length before it.

On the conversation trace of Mooncake (FAST'25) errors of the estimate were 1.3 points at most with
runs as long as all before them, since requests that part within a run are sampled alike; 0.9 with
a quarter, in four samples at each of five sizes (November 2026)."""

USES_PER_SLOT = 16
"""Keys without a slot whose uses are counted, for each slot."""


def sample_blocks(hashes: Sequence[bytes], rarity_bits: int, step: int = 1) -> list[int]:
    """Return the places of the sampled blocks of a prompt, each block with chance 1/2**rarity_bits.

    `hashes` name prefixes, and every `step`-th one a block. Prompts that share a prefix have the
    same sample of it. Blocks that follow each other are cut into runs, with at most one of a run in
    the sample, so that a long prompt has nearly as many as it should. Takes a time that grows with
    the logarithm of the prompt until runs have 2**rarity_bits blocks.
    """
    rarity = 1 << rarity_bits
    blocks, first, places = len(hashes) // step, 0, []
    while first < blocks:
        length = min(max(1, first // RUN_SHARE), rarity)
        # What lies before a run chooses its place; a run of one block chooses for itself.
        chooser = hashes[(first if length > 1 else first + 1) * step - 1]
        # The low bits choose a dict of `KeyMap`.
        place = first + ((hash(chooser) >> 16) & (rarity - 1))
        if place < first + length and place < blocks:
            places.append(place)
        first += length
    return places


class Miniature:
    """A cache of `slots` slots that is given sampled keys, and stores and loads nothing.

    With `store_after_uses` a key is stored when it comes for that time and has no slot.
    """

    def __init__(self, policy: str, slots: int, *, store_after_uses: int = 1) -> None:
        """Raises `CapacityError` for fewer slots than 1."""
        self._manager = CacheManager(make_policy(policy, slots))
        self._store_after_uses = store_after_uses
        self._uses: OrderedDict[Key, int] = OrderedDict()
        self._most_uses = USES_PER_SLOT * slots

    def serve(self, keys: Sequence[Key], first: int = 0, *, prompt_tokens: int = 0) -> int:
        """Serve a request with these keys, in prefix order; return how many from `first` on hit.

        A hit ends at the first key that has no slot. Keys before `first` are used, too.
        """
        manager = self._manager
        slots = manager.slot_numbers(keys)
        end = next((at for at in range(first, len(keys)) if slots[at] < 0), len(keys))
        if end > first:
            manager.complete_load(manager.prepare_load(keys[first:end]))
        others = [*range(first), *range(end, len(keys))]
        new = [keys[at] for at in others if slots[at] < 0]
        along = [slots[at] for at in others if slots[at] >= 0]
        if self._store_after_uses > 1:
            new = [key for key in new if self._count_use(key) >= self._store_after_uses]
        if new or along:
            known = np.array(along, np.int32) if along else NO_SLOTS
            run = Run(len(new), prompt_tokens, behind=keys[end - 1] if end else None)
            stored, _ = manager.offer(new, [run], known)
            manager.complete_store(stored)
        return end - first

    def _count_use(self, key: Key) -> int:
        uses = self._uses.pop(key, 0) + 1
        self._uses[key] = uses
        if len(self._uses) > self._most_uses:
            self._uses.popitem(last=False)
        return uses

    def reset(self) -> None:
        """Forget all keys."""
        self._manager.reset()
