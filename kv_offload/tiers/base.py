"""The interface between the scheduler and a tier below host memory, and the tier's health."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slots import Mask, Slots
from kv_offload.messages import Outcome, TierCapacity
from kv_offload.scheduler.timing import CopyRate
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.directory import Question

logger = logging.getLogger(__name__)

STUCK_SECONDS = 10.0
"""A copy hangs if it has been the oldest one in its direction for longer than this. The tier is not
used until it has ended."""

FIRST_PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 300.0
"""The first and the longest pause after an error; each pause is twice as long as the one before.

An error later than `LONGEST_PAUSE_SECONDS` after a pause counts as the first again: a remote store
can answer questions for weeks before a block is read, and only a read shows that it works."""


class Pause:
    """A pause of a tier's reads or writes after an error; there is none at first."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        """True if a copy may be tried now."""
        return time.monotonic() >= self._until

    def begin(self) -> float:
        """Begin a pause, twice as long as a recent one, and return its seconds."""
        now = time.monotonic()
        follows = now - self._until < LONGEST_PAUSE_SECONDS
        twice = max(FIRST_PAUSE_SECONDS, 2 * self._seconds if follows else 0.0)
        self._seconds = min(twice, LONGEST_PAUSE_SECONDS)
        self._until = now + self._seconds
        return self._seconds

    def went_well(self) -> None:
        """Make the next pause short again."""
        self._seconds = 0.0


class Tier(ABC):
    """The keys, health and speed of a tier. It is used once `open` has been called.

    A failed read or question pauses reads, and a failed write pauses writes: a full store still
    serves its blocks. A hanging copy stops both. The keys stay known meanwhile. The *place* of a
    key is a number by which the ranks find its block.
    """

    name: ClassVar[str]
    """Its name in the configuration and in messages to ranks."""

    what: ClassVar[str]
    """Its name in the log."""

    is_shared = False
    """True if other engines use the tier too. `readable` then knows only keys that `ask` found or
    this engine wrote, and the engine's policy cannot tell how often a block is read."""

    is_settled = True
    """True if no later process can find dropped blocks; `settle` ensures that."""

    def __init__(self) -> None:
        self.rate = CopyRate()
        """Rate of reads."""
        self.reading_slots = 0
        """Slots of host memory that are being filled from the tier."""
        self._reads = Pause()
        self._writes = Pause()
        self.is_stuck = False
        """True while a copy hangs."""
        # By kind, the oldest copy under way, and the time when it became the oldest.
        self._oldest: dict[Kind, tuple[Transfer, float]] = {}

    manager: CacheManager | None = None
    """Decides what the tier keeps; None if this engine does not decide that alone. KV events and
    quotas of the tier need it."""

    def evict(self, slots: Slots) -> None:
        """Drop the blocks in idle slots of a tier with a `manager`."""
        raise NotImplementedError

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True once all ranks have reported their capacity."""

    @abstractmethod
    def open(self, ranks: Mapping[int, TierCapacity]) -> None:
        """Start using the tier; a second call does nothing. Raises `ConfigError`."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """End the threads of the tier, within the timeout."""

    @property
    @abstractmethod
    def generation(self) -> bytes:
        """Prefix of every block's name; changes with `forget_all`."""

    @abstractmethod
    def readable(self, keys: Sequence[bytes]) -> Mask:
        """Return a mask of the keys that the tier is known to have, even if reads are stopped."""

    @abstractmethod
    def may_have(self, key: bytes) -> bool:
        """Return whether the tier may have a key; True wherever `readable` is. Fast."""

    def ask(self, keys: Sequence[bytes], *, are_chained: bool) -> Question | None:
        """Ask which of these keys the tier has; None if `readable` already knows.

        `are_chained`: each key is useful only with all before it.
        """
        return None

    @abstractmethod
    def begin_write(self, keys: Sequence[bytes]) -> tuple[list[int], Slots]:
        """Return the indices of the keys to write, and their places.

        Keys that the tier already has count as used and are not written.
        """

    @abstractmethod
    def end_write(self, move: Transfer, failed: Mask) -> None:
        """Act on the end of a write; `failed` masks the keys that the tier does not have."""

    @abstractmethod
    def begin_read(self, keys: Sequence[bytes]) -> Slots:
        """Return the places of readable keys, and hold them until `end_read`."""

    @abstractmethod
    def end_read(self, move: Transfer, failed: Mask) -> None:
        """Act on the end of a read; `failed` masks keys whose blocks were unreadable or wrong."""

    @abstractmethod
    def forget_all(self) -> bool:
        """Drop all blocks; return whether there were any.

        Blocks stored from now on are not for other processes.
        """

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        """Keep later processes from finding dropped blocks; return whether that is certain.

        `problems` has the result of `OffloadWorker.revoke_tiers` for each rank. Can block until the
        timeout.
        """
        return True

    @abstractmethod
    def gauges(self) -> dict[str, float]:
        """Return the gauges of `kv_offload.metrics` for this kind of tier."""

    def check_integrity(self) -> None:  # noqa: B027 (a tier without keys has nothing to check)
        """Raise `AssertionError` where the state contradicts itself."""

    @property
    def is_asked(self) -> bool:
        """True while a question has no answer yet."""
        return False

    @property
    def _is_ready(self) -> bool:
        return self.is_open and not self.is_stuck

    @property
    def may_read(self) -> bool:
        """True if the tier may be read, or asked, now."""
        return self._is_ready and self._reads.is_over

    @property
    def may_write(self) -> bool:
        """True if the tier may be written now."""
        return self._is_ready and self._writes.is_over

    def next_step(self, oldest: Iterable[Transfer], now: float) -> None:
        """Find out whether a copy hangs; `oldest` has the oldest one under way in each direction.

        `now` is the time of `StepTime`. A queued copy does not hang: a disk with a long queue of
        writes is still read.
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
        """Update the health after a copy has ended. The ranks' logs say why one failed.

        Returns the length in seconds of the write pause that begins now, or 0.
        """
        if move.outcome is Outcome.OK:
            (self._reads if move.kind is Kind.PROMOTE else self._writes).went_well()
        elif move.kind is Kind.PROMOTE:
            self.read_failed()
        else:
            return self.write_failed()
        return 0.0

    def read_failed(self) -> None:
        """Pause reads, because a read or a question failed."""
        if self._reads.is_over:  # else another copy under way has failed already
            logger.warning(
                "kv-offload: the %s could not be read. It is not read for %.0f s",
                self.what,
                self._reads.begin(),
            )

    def write_failed(self) -> float:
        """Pause writes; return for how many seconds, or 0 if they are paused already."""
        if not self._writes.is_over:
            return 0.0
        seconds = self._writes.begin()
        if self._reads.is_over:  # else one warning is enough
            logger.warning(
                "kv-offload: the %s could not be written. It is not written for %.0f s",
                self.what,
                seconds,
            )
        return seconds
