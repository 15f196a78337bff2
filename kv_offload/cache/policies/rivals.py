"""Which rule would have brought more hits recently: recency, or hit density.

Neither needs a cache to be followed. `HitDensity` counts by class and age all keys that are
watched, with a slot or without one. So this only keeps the share of each of these cells that a rule
would still have: recency has the keys that were used last, as many as there are slots, and hit
density has the cells that are worth most. An access to a key counts as a hit by the share of its
cell. On the traces and workloads of `bench/trace` such hits are within half a point of those of a
real cache in most cells (November 2026).

Recency leads at first. Each epoch adds what hit density brought beyond recency to a credit, in
standard deviations, and takes a rent from it. Hit density leads from some credit on, until it has
none. While it leads, the hits that it really brought count: prompts that are large for the cache
are kept worse than their cells say.

A change of the traffic shows in keys that nobody has seen before: in a loop over more than memory
holds all that is missed is known. So as soon as many such keys have come one after the other,
everything is stored, and stays for as long as none comes that is known. If that was long, hit
density has lost the lead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies.density import AGES, CLASSES, HitDensity
from kv_offload.cache.policies.ranking import NEVER

MEMORY_EPOCHS = 32
"""Epochs over which the mean of the leads and their variance are taken."""

LEAST_NOISE = 0.005
"""Share of the accesses by which leads are taken to vary at least, so that tiny ones count less."""

LEAST_ACCESSES = 2048
"""Leads of shorter epochs are added up as parts of one of so many accesses. With 512, a cache for
2,500 blocks changed its rule 12 times in Mooncake's synthetic trace instead of twice, and lost a
point of its hits (November 2026)."""

RENT = 0.1
"""The lead that keeps the credit as it is, in standard deviations. While hit density leads it is
half of the mean lead, if that is more: so the credit also ends when the hits do."""

ENTER, MOST = 2.0, 6.0
"""The credit from which on hit density leads, and the most that it has. It begins with the most:
it takes a while until the cache has what it would have had."""


MIN_NEW, NEW_OF_CAPACITY = 64, 100
"""Keys never seen before, one after the other, from which on new ones are stored, whatever they are
worth: one for so many slots, and so many at least. As many are missing in the next pass."""

MIN_CHANGE = 1024
"""So many more, or an epoch if that is more, are a change of the traffic. With 512, a cache for
1,000 blocks had 1.1 points less in Mooncake's synthetic trace (November 2026)."""


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
        self._run = self._run_began = 0  # keys never seen before, and the epoch of the first
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
        """The epoch from which on what was used is kept by recency."""
        if not self.density_leads:
            return 0
        return self._run_began if self._in_long_run else NEVER

    def see_new(self, known: NDArray[np.bool_]) -> bool:
        """Take in an access to keys without a slot; return whether others leave first now.

        `known` says which of them were seen before. What was seen before these keys decides: one
        long prompt is no change.
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
        """Take in an access to a key seen before; return whether others leave first now."""
        changed = self._in_long_run
        if changed and self._run >= self._change:
            self.density_leads, self._credit = False, 0.0
        self._in_long_run = False
        self._run, self._run_began = 0, self._density.epoch
        return changed

    def end_epoch(self, found: int) -> None:
        """Compare the hits of an epoch; `found` are those of the cache.

        To be called before what is watched becomes older.
        """
        alive, hits = self._density.by_age()
        simulated = float((hits * self._by_density).sum())
        of_density = simulated if self.stores_all else found
        of_recency = float(hits.sum(axis=1) @ self._by_recency)
        if not self.density_leads:
            # The shares are those of whole epochs. Where prompts just fit, that misses hits.
            of_recency = max(of_recency, found)
        self._judge(of_density - of_recency)
        # Entries that become too old to be distinguished join those that are.
        oldest = (alive[-2:] * self._by_density[-2:]).sum(axis=0)
        self._by_density[1:] = self._by_density[:-1]
        self._by_density[-1] = oldest / np.maximum(alive[-2:].sum(axis=0), 1)

    def _judge(self, lead: float) -> None:
        """Change who leads where an epoch with this lead of hit density is reason enough."""
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
        """Have both rules evict what they have no room for, as the keys are worth now."""
        alive, _ = self._density.by_age()
        of_age = alive.sum(axis=1)
        room = self._capacity - (np.cumsum(of_age) - of_age)
        self._by_recency[1:] = np.clip(room / np.maximum(of_age, 1), 0, 1)[1:]
        kept = alive * self._by_density
        excess = kept.sum() - self._capacity
        if excess > 0:
            cells = np.flatnonzero(kept)[::-1]  # the older first of equals
            worth = self._density.worth.ravel()
            cells = cells[np.argsort(worth[cells], kind="stable")]
            sizes = kept.ravel()[cells]
            leaving = np.clip(excess - (np.cumsum(sizes) - sizes), 0, sizes)
            self._by_density.ravel()[cells] *= 1 - leaving / sizes
            self._least_kept = worth[cells[np.count_nonzero(leaving) - 1]]
        is_full = excess > -self._capacity / 16
        self._by_density[0] = self._density.new > self._least_kept if is_full else 1.0
