"""The interface of a tier below host memory to the scheduler, and the tier's health."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slots import Slots
from kv_offload.messages import Outcome, TierCapacity
from kv_offload.scheduler.timing import CopyRate
from kv_offload.scheduler.transfers import Kind, Transfer

if TYPE_CHECKING:
    from kv_offload.tiers.questions import Question

logger = logging.getLogger(__name__)

STUCK_SECONDS = 10.0
"""A copy that has not ended so long after those before it counts as one that hangs. The tier is not
used before it has ended."""

FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0
"""Seconds of a pause after an error; twice as long after each that follows.

One that comes later than the longest pause after the end of the one before is a first one again. A
store may answer for weeks without a block that is read, so that nothing is known to go well."""


class Pause:
    """For how long a tier is not read, or not written, after an error. Begins as none."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        """True if it may be tried now."""
        return time.monotonic() >= self._until

    def begin(self) -> float:
        """Begin a pause, twice as long as the one before it if any, and return its seconds."""
        now = time.monotonic()
        follows = now - self._until < LONGEST_PAUSE_SECONDS
        twice = max(FIRST_PAUSE_SECONDS, 2 * self._seconds if follows else 0.0)
        self._seconds = min(twice, LONGEST_PAUSE_SECONDS)
        self._until = now + self._seconds
        return self._seconds

    def went_well(self) -> None:
        """Have the next pause be a short one."""
        self._seconds = 0.0


class Tier(ABC):
    """The keys of a tier, its health and its speed. Not used until `open` has heard of all ranks.

    After a read or a question that failed nothing is read for a while, after a write that failed
    nothing is written: a store that is full still serves what it has. While a copy hangs there is
    neither. What it holds stays known meanwhile.

    Keys to write are announced with `begin_write`, keys to read with `begin_read`. Both give each
    its *place*, the number by which the ranks find it beside its name.
    """

    name: ClassVar[str]
    """The section of the configuration that it comes from; the ranks know it by this."""

    what: ClassVar[str]
    """Its name in the log."""

    is_shared = False
    """True if other engines use it, too: `readable` knows only what `ask` has found then, and the
    uses that the policy of this engine has seen say little of how often a block is read."""

    is_settled = True
    """True if no later process can find what was dropped. Not until `settle` has seen to it."""

    def __init__(self) -> None:
        self.rate = CopyRate()
        """Rate of reads."""
        self.reading_slots = 0
        """Slots of host memory that are being filled from it."""
        self._reads = Pause()
        self._writes = Pause()
        self.is_stuck = False
        """True if a copy hangs, so that there is no saying when it ends."""
        # By kind, the oldest copy under way, and since when no older one is.
        self._oldest: dict[Kind, tuple[Transfer, float]] = {}

    manager: CacheManager | None = None
    """Decides what the tier keeps, where that is up to this engine. So routers can be told, and
    tenants have quotas."""

    def evict(self, slots: Slots) -> None:
        """Forget what is in idle slots of such a tier."""
        raise NotImplementedError

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True once all ranks have reported their capacity."""

    @abstractmethod
    def open(self, ranks: Mapping[int, TierCapacity]) -> None:
        """Begin to use the tier; a second call does nothing. Raises `ConfigError`."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """End what runs on threads of the tier."""

    @property
    @abstractmethod
    def generation(self) -> bytes:
        """Begins every block's name; another one after `forget_all`."""

    @abstractmethod
    def readable(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Say for each key whether the tier is known to have it, be it used now or not."""

    @abstractmethod
    def may_have(self, key: bytes) -> bool:
        """Say whether the tier may have a key; False where `readable` does not say so. Fast."""

    def ask(self, keys: Sequence[bytes], *, are_chained: bool) -> Question | None:
        """Ask which of these keys the tier has; None if `readable` knows all there is to know.

        `are_chained` says that each is of use only with those before it.
        """
        return None

    @abstractmethod
    def begin_write(self, keys: Sequence[bytes]) -> tuple[list[int], Slots]:
        """Say which of these keys are to be written, by their indices, and give each a place.

        What the tier has counts as used, and is not written.
        """

    @abstractmethod
    def end_write(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """Take in the end of a write; `failed` says which of its keys the tier has not."""

    @abstractmethod
    def begin_read(self, keys: Sequence[bytes]) -> Slots:
        """Return the places of keys that are readable."""

    @abstractmethod
    def end_read(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """Take in the end of a read; `failed` says which of its keys were not what they should."""

    @abstractmethod
    def forget_all(self) -> bool:
        """Forget everything; say whether there was anything.

        What is stored from now on is not for another process.
        """

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        """See to it that no later process finds what was forgotten; say whether that is sure.

        `problems` has for each rank what `OffloadWorker.revoke_tiers` returned. May block until the
        timeout.
        """
        return True

    @abstractmethod
    def gauges(self) -> dict[str, float]:
        """Return the gauges of `kv_offload.metrics` that tell of this kind of tier."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself."""

    @property
    def is_asked(self) -> bool:
        """True if a thread is looking for the answer to what was asked."""
        return False

    # -- whether it is used --------------------------------------------------------------------

    @property
    def _is_ready(self) -> bool:
        """True if it is open, and answers."""
        return self.is_open and not self.is_stuck

    @property
    def may_read(self) -> bool:
        """True if it may be read, or asked, now."""
        return self._is_ready and self._reads.is_over

    @property
    def may_write(self) -> bool:
        """True if it may be written now."""
        return self._is_ready and self._writes.is_over

    def next_step(self, oldest: Iterable[Transfer], now: float) -> None:
        """See whether a copy hangs; `oldest` has the oldest one under way of each direction.

        `now` is what `StepTime` says.

        Ranks begin the copies of a direction in order. So one that waits for its turn does not
        hang: a disk that is written faster than it can write is still read.
        """
        known, self._oldest = self._oldest, {}
        for move in oldest:
            before, since = known.get(move.kind, (move, move.sent_after))
            self._oldest[move.kind] = move, since if move is before else now
        stuck = any(now - since > STUCK_SECONDS for _, since in self._oldest.values())
        if stuck and not self.is_stuck:
            logger.warning(
                "kv-offload: a copy to or from the %s has not ended in %.0f s. The %s is not "
                "used until it has",
                self.what,
                STUCK_SECONDS,
                self.what,
            )
        self.is_stuck = stuck

    def copied(self, move: Transfer) -> float:
        """Take in how a copy ended; the ranks' logs say why one failed.

        Returns for how many seconds nothing is written, if such a pause begins now, else 0.
        """
        if move.outcome is Outcome.OK:
            (self._reads if move.kind is Kind.PROMOTE else self._writes).went_well()
        elif move.kind is Kind.PROMOTE:
            self.read_failed()
        else:
            return self.write_failed()
        return 0.0

    def read_failed(self) -> None:
        """Read nothing for a while, because a read or a question failed."""
        if self._reads.is_over:  # else it is one of several that were under way
            logger.warning(
                "kv-offload: the %s could not be read. It is not read for %.0f s",
                self.what,
                self._reads.begin(),
            )

    def write_failed(self) -> float:
        """Write nothing for a while; return for how many seconds from now, 0 if that has begun.

        If nothing is read either, that has been told already.
        """
        if not self._writes.is_over:
            return 0.0
        seconds = self._writes.begin()
        if self._reads.is_over:
            logger.warning(
                "kv-offload: the %s could not be written. It is not written for %.0f s",
                self.what,
                seconds,
            )
        return seconds
