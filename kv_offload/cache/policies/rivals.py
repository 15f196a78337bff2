"""Decides which rule would have brought more hits recently: recency, or hit density.

Following the rules takes no cache. `HitDensity` counts all watched keys, with or without a slot, by
class and age. So this module only keeps the share of each of these cells that a rule would still
hold: recency holds the most recently used keys, as many as there are slots, and hit density holds
the cells that are worth most. An access counts as a hit by the share of its cell. On the traces and
workloads of `bench/trace` such hits are within half a point of those of a real cache in most cells
(November 2026). docs/design/eviction.md says how the lead changes. While hit density leads, its
real hits count: it keeps prompts that are large for the cache less well than their cells say.

New traffic brings keys that were never seen before, whereas in a loop over more than memory holds,
every missed key is known. So after a long run of new keys, everything is stored, and stays until a
known key is accessed. If the run was very long, hit density then loses the lead.
"""

from __future__ import annotations

import numpy as np

from kv_offload.cache.policies.density import AGES, CLASSES, HitDensity
from kv_offload.cache.policies.ranking import NEVER
from kv_offload.cache.slots import Mask

MEMORY_EPOCHS = 32
"""Number of epochs over which the mean and variance of the leads are averaged."""

LEAST_NOISE = 0.005
"""Minimum standard deviation of the leads, as a share of the accesses: tiny ones count less."""

LEAST_ACCESSES = 2048
"""Shorter epochs count as parts of an epoch of this many accesses. With 512, a cache for 2,500
blocks changed its rule 12 times in Mooncake's synthetic trace instead of twice, and lost a point of
its hits (November 2026)."""

RENT = 0.1
"""The lead that leaves the credit unchanged, in standard deviations. While hit density leads it is
half of the mean lead, if that is more, so the credit also ends when the hits do."""

ENTER, MOST = 2.0, 6.0
"""The credit at which hit density takes the lead, and the maximum credit. It takes the lead with
the maximum, because the cache needs a while to gather the blocks that hit density would have
kept."""

MIN_NEW, NEW_OF_CAPACITY = 64, 100
"""After a run of this many keys that were never seen before, new keys are stored whatever they are
worth: one per `NEW_OF_CAPACITY` slots, and at least `MIN_NEW`. As many miss in the next pass."""

MIN_CHANGE = 1024
"""A run that is longer by this, or by an epoch if that is more, is a change of the traffic. With
512, a cache for 1,000 blocks had 1.1 points less in Mooncake's synthetic trace (November 2026)."""


class Rivals:
    """Follows both rules epoch by epoch."""

    def __init__(self, capacity: int, density: HitDensity, epoch_accesses: int) -> None:
        self._capacity = capacity
        self._density = density
        self._least_noise = LEAST_NOISE * epoch_accesses
        self._long_run = max(MIN_NEW, capacity // NEW_OF_CAPACITY)
        self._change = self._long_run + max(MIN_CHANGE, epoch_accesses)
        self._parts = max(1.0, LEAST_ACCESSES / epoch_accesses)
        self.clear()

    def clear(self) -> None:
        """Start with empty caches, and with recency in the lead."""
        self.density_leads = False
        self._credit = 0.0
        self._run = self._run_began = 0  # length of the run of new keys, and the epoch of the first
        self._in_long_run = False
        self._mean, self._variance = 0.0, (4 * self._least_noise) ** 2
        # The shares: by age and class, and by age.
        self._by_density = np.ones((AGES + 1, CLASSES))
        self._by_recency = np.ones(AGES + 1)
        self._least_kept = 0.0

    @property
    def stores_all(self) -> bool:
        """True if new keys are stored whatever they are worth."""
        return self._in_long_run or not self.density_leads

    @property
    def recent_from(self) -> int:
        """The first epoch whose accessed slots are kept by recency."""
        if not self.density_leads:
            return 0
        return self._run_began if self._in_long_run else NEVER

    def see_new(self, known: Mask) -> bool:
        """Record an access to keys without a slot; return whether the order of eviction changed.

        `known` says which of them were seen before. Only keys before this call decide: one long
        prompt is not a change.
        """
        changed, count = False, len(known)
        if known.any():
            places = np.flatnonzero(known)
            self._run += int(places[0])
            changed = self.see_known()
            count -= int(places[-1]) + 1
        if self.density_leads and not self._in_long_run and count and self._run >= self._long_run:
            changed = self._in_long_run = True
        self._run += count
        return changed

    def see_known(self) -> bool:
        """Record an access to a key seen before; return whether the order of eviction changed."""
        changed = self._in_long_run
        if changed and self._run >= self._change:
            self.density_leads, self._credit = False, 0.0
        self._in_long_run = False
        self._run, self._run_began = 0, self._density.epoch
        return changed

    def end_epoch(self, found: int) -> None:
        """Compare the hits of an epoch; `found` is the number of hits of the cache.

        Must be called before the watched keys grow an epoch older.
        """
        alive, hits = self._density.by_age()
        simulated = float((hits * self._by_density).sum())
        of_density = simulated if self.stores_all else found
        of_recency = float(hits.sum(axis=1) @ self._by_recency)
        if not self.density_leads:
            # Shares are of whole epochs, which misses hits if prompts just fit.
            of_recency = max(of_recency, found)
        self._judge(of_density - of_recency)
        # Keys that become too old to be distinguished join the oldest ones.
        oldest = (alive[-2:] * self._by_density[-2:]).sum(axis=0)
        self._by_density[1:] = self._by_density[:-1]
        self._by_density[-1] = oldest / np.maximum(alive[-2:].sum(axis=0), 1)

    def _judge(self, lead: float) -> None:
        """Change the leader if an epoch with this lead of hit density justifies it."""
        noise = max(self._variance**0.5, self._least_noise)
        rent = max(RENT * noise, self._mean / 2 if self.density_leads else 0.0)
        credit = self._credit + (lead - rent) / (noise * self._parts**0.5)
        if self.density_leads:
            self.density_leads = credit > 0
        elif credit >= ENTER:
            self.density_leads, credit = True, MOST
        self._credit = min(max(credit, 0.0), MOST)
        change = lead - self._mean
        self._variance += (change**2 - self._variance) / MEMORY_EPOCHS
        self._mean += change / MEMORY_EPOCHS

    def begin_epoch(self) -> None:
        """Make both rules evict down to the capacity, by the current worth of the keys."""
        alive, _ = self._density.by_age()
        of_age = alive.sum(axis=1)
        room = self._capacity - (np.cumsum(of_age) - of_age)
        self._by_recency[1:] = np.clip(room / np.maximum(of_age, 1), 0, 1)[1:]
        kept = alive * self._by_density
        excess = kept.sum() - self._capacity
        if excess > 0:
            cells = np.flatnonzero(kept)[::-1]  # the older first among equals
            worth = self._density.worth.ravel()
            cells = cells[np.argsort(worth[cells], kind="stable")]
            sizes = kept.ravel()[cells]
            leaving = np.clip(excess - (np.cumsum(sizes) - sizes), 0, sizes)
            self._by_density.ravel()[cells] *= 1 - leaving / sizes
            self._least_kept = worth[cells[np.count_nonzero(leaving) - 1]]
        is_full = excess > -self._capacity / 16
        self._by_density[0] = self._density.new > self._least_kept if is_full else 1.0
