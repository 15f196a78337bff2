"""The interface of a tier to its threads: it moves a few rows of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kv_swap.errors import TierError

if TYPE_CHECKING:
    from kv_swap.tiers.engine import TierDirection


class Row(NamedTuple):
    """One row of a job, by its number there."""

    number: int
    arena_slot: int
    tier_slot: int
    name: bytes


@dataclass(slots=True)
class Outcome:
    """How rows fared: those that failed, how many of them were mismatches, and the first error.

    `unmoved` rows were there already, so no bytes were moved. `rejection` is why single rows
    failed: an error of the job only if all its rows did. `gone` says that the tier as a whole did
    not answer: what was queued before fails likewise.
    """

    failed: list[int] = field(default_factory=list)
    mismatches: int = 0
    unmoved: int = 0
    error: TierError | None = None
    rejection: TierError | None = None
    gone: bool = False

    def fail(self, row: Row, error: TierError) -> None:
        """Note that a row could not be moved."""
        self.failed.append(row.number)
        self.error = self.error or error

    def add(self, other: Outcome) -> None:
        """Note how other rows of the same job fared."""
        self.failed += other.failed
        self.mismatches += other.mismatches
        self.unmoved += other.unmoved
        self.error = self.error or other.error
        self.rejection = self.rejection or other.rejection


class Mover(ABC):
    """Moves rows on one thread. It holds the tier and the arena."""

    @abstractmethod
    def move(self, direction: TierDirection, rows: Sequence[Row]) -> Outcome:
        """Move rows, at most a chunk, ascending in tier slots."""
