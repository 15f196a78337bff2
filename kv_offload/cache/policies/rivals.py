"""Which of two rules would have brought more hits lately: recency, or what was learnt.

Neither needs a cache to be followed. Every key that was accessed is watched, with a slot or without
one, and `HitDensity` counts them by class and age. So per class and age this only keeps how large a
share of them each rule would still have: recency those that were accessed last, as many as there are
slots, and hit density the cells that are worth most. An access to a key is a hit of a rule by the
share that it has of the key's cell. On the traces and workloads of `bench/trace` these hits differ
from those of a real cache with that rule by half a point in most cells.

Recency is in charge until hit density has been ahead by more than chance would explain, and again
soon after it no longer is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies.density import AGES, CLASSES, HitDensity

MEMORY_EPOCHS = 32
"""Epochs over which the lead of hit density and its variance are averaged."""

LEAST_NOISE = 0.005
"""Share of all accesses that the lead is taken to vary by at least: smaller leads count less."""

LEAST_ACCESSES = 512
"""An epoch of fewer accesses is taken to be noisier than it was, as a part of one of so many."""

RENT = 0.1
"""What a lead must exceed, in standard deviations, or half of what it was on average."""

ENTER, MOST = 2.0, 6.0
"""Credit with which hit density takes charge, and the most that it saves."""


class Rivals:
    """Follows both rules, epoch by epoch, and says which is in charge."""

    def __init__(self, capacity: int, density: HitDensity, epoch_accesses: int) -> None:
        self._capacity = capacity
        self._density = density
        self._least_noise = LEAST_NOISE * epoch_accesses
        self._parts = max(1.0, LEAST_ACCESSES / epoch_accesses)
        self.clear()

    def clear(self) -> None:
        """Start with empty caches, and with recency in charge."""
        self.density_leads = False
        self._credit = 0.0
        self._mean, self._variance = 0.0, (4 * self._least_noise) ** 2
        # By age and class: the share that each rule has of the keys.
        self._by_density = np.ones((AGES + 1, CLASSES))
        self._by_recency = np.ones((AGES + 1, 1))
        self.log=[]

    def end_epoch(self, found: int) -> None:
        """Compare the hits of the epoch that ends, before the ages of what is watched change."""
        alive, hits = self._density.by_age()
        of_recency = (hits * self._by_recency).sum()
        of_density = found if self.density_leads else (hits * self._by_density).sum()
        lead = float(of_density - of_recency)
        rent = max(RENT * self._noise, self._mean / 2 if self.density_leads else 0.0)
        self._credit += (lead - rent) / (self._noise * self._parts**0.5)
        self._credit = min(max(self._credit, 0.0), MOST)
        change = lead - self._mean
        self._variance += (change**2 - self._variance) / MEMORY_EPOCHS
        self._mean += change / MEMORY_EPOCHS
        if self.density_leads:
            self.density_leads = self._credit > 0
        elif self._credit >= ENTER:
            self.density_leads, self._credit = True, MOST
        self.log.append((lead,self._credit,self.density_leads))
        # What becomes too old to be told apart joins what is.
        oldest = alive[-2:] * self._by_density[-2:]
        self._by_density[1:] = self._by_density[:-1]
        self._by_density[-1] = oldest.sum(axis=0) / np.maximum(alive[-2:].sum(axis=0), 1)

    @property
    def _noise(self) -> float:
        return max(self._variance**0.5, self._least_noise)

    def begin_epoch(self) -> None:
        """Have both rules evict what they have no room for, as the keys are worth now."""
        alive, _ = self._density.by_age()
        younger = np.cumsum(alive.sum(axis=1))
        room = self._capacity - younger
        self._by_recency[1:, 0] = np.clip(1+ room[1:] / np.maximum(np.diff(younger), 1), 0, 1)
        kept = alive * self._by_density
        kept[0] = 0
        excess = kept.sum() - self._capacity
        least = 0.0
        if excess > 0:
            cells = np.flatnonzero(kept)[::-1]
            worth = self._density.worth.ravel()
            cells = cells[np.argsort(worth[cells], kind="stable")]
            sizes = kept.ravel()[cells]
            leaving = np.clip(excess - (np.cumsum(sizes) - sizes), 0, sizes)
            self._by_density.ravel()[cells] *= 1 - leaving / sizes
            least = worth[cells[np.count_nonzero(leaving) - 1]]
            self._least=least
        full = excess > -self._capacity / 16
        self._by_density[0] = (self._density.new > self._least) if full else 1.0
    _least=0.0
