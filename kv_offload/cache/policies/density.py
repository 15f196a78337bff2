"""Hit density: the hits that a block can bring for the room it takes, learned from other blocks.

A *life* of a key lasts from one access to the next. Its class is the number of accesses so far and
the length of the prompt that first had the key. Ages are counted in epochs, each a fixed number of
accesses to any block. Per class and age, this module counts the lives that continued and the lives
that ended with an access. From these it knows how likely a block of a class and age is used at each
later age.

The density of a block is the highest number of hits per block and epoch that keeping it can bring,
over all ages at which it could be evicted. N. Beckmann, H. Chen and A. Cidon, "LHD: Improving Cache
Hit Rate by Maximizing Hit Density", NSDI 2018; the maximum over that age is the index of J. C.
Gittins.

A bucket is a class and the epoch of the last access. Its number is `epoch * CLASSES + class`.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import Mask

Buckets: TypeAlias = NDArray[np.int64]
"""Numbers of buckets, shape `(n,)`; 0 stands for none."""

USES, LENGTHS = 4, 8
CLASSES = USES * LENGTHS
"""Used once, twice, three times or more often, each by the length of the prompt."""

LENGTH_EDGES = 1024 << np.arange(LENGTHS - 1)
"""Prompt lengths in tokens at which the next length class begins."""

_once = np.arange(CLASSES)
NEXT_CLASS = np.where(_once < CLASSES - LENGTHS, _once + LENGTHS, _once)
"""By class: the class after one more use."""

AGES = 256
OLD = 1
"""Ages of `AGES` epochs and more are not distinguished: their buckets have the epoch `OLD`."""

BINS_PER_DOUBLING = 2
"""Ages are pooled in bins that grow with age, because there is less evidence for high ages."""

PRIOR_EPOCHS = 10.0
PRIOR_RATE = 0.05
"""The prior: a block of age `a` is used `PRIOR_RATE / (a + 1)` times per epoch, which makes the
policy LRU. It weighs as much as evidence from this many epochs of one block."""

USE_EPOCHS, CLASS_EPOCHS = 200.0, 1000.0
"""Block epochs of evidence that the less specific rates weigh: the rates of all blocks when
estimating those with the same number of uses, and these when estimating a class. On Mooncake's
conversation trace 10 and 50 cost 0.1 points (November 2026)."""


def _bin_starts() -> NDArray[np.int64]:
    starts, growth = [0], 2 ** (1 / BINS_PER_DOUBLING)
    while (start := max(starts[-1] + 1, round(starts[-1] * growth))) < AGES:
        starts.append(start)
    return np.array([*starts, AGES])


STARTS = _bin_starts()
BIN_OF_AGE = np.searchsorted(STARTS, np.arange(AGES + 1), side="right") - 1
WIDTHS = np.diff(STARTS, append=2 * AGES).astype(float)
WIDTHS[0] = 0.5  # an access falls into the middle of its epoch, on average

_CELLS = CLASSES * (AGES + 1)


class HitDensity:
    """Counts lives and how they ended, and computes the worth of a block of each class and age."""

    def __init__(self, memory_epochs: float) -> None:
        """The weight of evidence decays by a factor of e every `memory_epochs`."""
        self._decay = np.exp(-1 / memory_epochs)
        # By class and age: accesses, and epochs lived by all blocks together.
        self._hits = np.zeros((CLASSES, AGES + 1))
        self._lived = np.zeros((CLASSES, AGES + 1))
        self.clear()

    def clear(self) -> None:
        """Drop ongoing lives; the evidence from ended lives stays."""
        self.epoch = OLD + AGES
        # Ongoing lives by class and epoch, in a ring whose extra last place is for older epochs.
        self._alive = np.zeros(_CELLS, np.int64)
        self._new_hits = np.zeros(_CELLS, np.int64)  # in this epoch, by class and age
        self.compute()

    def count(self, begun: Buckets, ended: Buckets, lost: Buckets) -> None:
        """Count lives that began, that ended with an access, and that are no longer watched."""
        np.add.at(self._alive, self._cells(begun), 1)
        np.subtract.at(self._alive, self._cells(np.concatenate((ended, lost))), 1)
        np.add.at(self._new_hits, ended % CLASSES * (AGES + 1) + self._ages(ended), 1)

    def _cells(self, buckets: Buckets) -> NDArray[np.int64]:
        """Return the index of each bucket in the counts of ongoing lives."""
        epochs = buckets // CLASSES
        places = np.where(epochs > self.epoch - AGES, epochs % AGES, AGES)
        cells: NDArray[np.int64] = places * CLASSES + buckets % CLASSES
        return cells

    def _ages(self, buckets: Buckets) -> NDArray[np.int64]:
        ages: NDArray[np.int64] = np.minimum(self.epoch - buckets // CLASSES, AGES)
        return ages

    def by_age(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ongoing lives, and those that ended with an access in this epoch.

        Both by age and class, shape `(AGES + 1, CLASSES)`.
        """
        place = self.epoch % AGES
        alive = self._alive.reshape(-1, CLASSES)
        by_age = np.concatenate((alive[place::-1], alive[AGES - 1 : place : -1], alive[AGES:]))
        return by_age, self._new_hits.reshape(CLASSES, -1).T

    @property
    def lives(self) -> int:
        """Number of ongoing lives."""
        assert (self._alive >= 0).all(), "more lives have ended than have begun"
        return int(self._alive.sum())

    def next_epoch(self) -> None:
        """Make all ongoing lives an epoch older."""
        hits = self._new_hits.reshape(CLASSES, -1)
        alive = self._alive.reshape(-1, CLASSES)
        lived = self.by_age()[0].T + hits / 2
        lived[:, 0] /= 2
        self._hits *= self._decay
        self._hits += hits
        self._lived *= self._decay
        self._lived += lived
        self._new_hits[:] = 0
        self.epoch += 1
        place = self.epoch % AGES
        alive[AGES] += alive[place]
        alive[place] = 0

    def compute(self) -> None:
        """Compute the worth of blocks from the counts."""
        rates = self._rates()
        # For a block that was just accessed: the probability that it is still unused when each bin
        # begins, and the expected epochs it has taken by then.
        start = np.zeros((CLASSES, 1))
        unused = np.exp(-np.concatenate((start, np.cumsum(rates * WIDTHS, axis=1)), axis=1))
        taken = np.cumsum((unused[:, :-1] - unused[:, 1:]) / rates, axis=1)
        taken = np.concatenate((start, taken), axis=1)
        # By class, age, and age of eviction.
        hits = unused[:, :-1, None] - unused[:, None, 1:]
        room = taken[:, None, 1:] - taken[:, :-1, None]
        densities = (hits / np.maximum(room, 1e-12)).max(axis=2)  # else it would leave no later
        self.worth: NDArray[np.float64] = densities.T[BIN_OF_AGE]
        """The worth of a block, by age and class, shape `(AGES + 1, CLASSES)`."""
        self._chance = (1 - unused[:, -1:] / np.maximum(unused[:, :-1], 1e-300))[:, BIN_OF_AGE]
        self.new = self.worth[0].copy()
        """The worth of a block of each class right after an access."""

    def _rates(self) -> NDArray[np.float64]:
        """Return the accesses per block and epoch, by class and bin of ages; all above 0."""
        hits = np.add.reduceat(self._hits, STARTS, axis=1).reshape(USES, LENGTHS, -1)
        lived = np.add.reduceat(self._lived, STARTS, axis=1).reshape(USES, LENGTHS, -1)
        prior = PRIOR_RATE / (STARTS + 1)
        of_all = (hits.sum(axis=(0, 1)) + PRIOR_EPOCHS * prior) / (
            lived.sum(axis=(0, 1)) + PRIOR_EPOCHS
        )
        by_use = (hits.sum(axis=1) + USE_EPOCHS * of_all) / (lived.sum(axis=1) + USE_EPOCHS)
        rates = (hits + CLASS_EPOCHS * by_use[:, None]) / (lived + CLASS_EPOCHS)
        bounded: NDArray[np.float64] = np.maximum(rates.reshape(CLASSES, -1), 1e-9)
        return bounded

    def of(self, buckets: Buckets) -> NDArray[np.float64]:
        """Return the worth of the blocks of each bucket: hits per block and epoch."""
        density: NDArray[np.float64] = self.worth[self._ages(buckets), buckets % CLASSES]
        return density

    def likely(self, buckets: Buckets) -> Mask:
        """Return which blocks have a chance of reuse of at least one half, or at least average.

        Without evidence, all of them.
        """
        ended = self._hits.sum()
        average = ended / (ended + self._alive.sum() + 1)
        chance = self._chance[buckets % CLASSES, self._ages(buckets)]
        likely: Mask = chance >= min(0.5, average)
        return likely
