"""The interface between a tier and its threads, which moves a few rows of a job at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kv_swap.errors import TierError

if TYPE_CHECKING:
    from kv_swap.tiers.engine import TierDirection


class Row(NamedTuple):
    """One row of a job, with its number in the job."""

    number: int
    arena_slot: int
    tier_slot: int
    name: bytes


@dataclass(slots=True)
class MoveResult:
    """The result of some rows: those that failed, the number of mismatches, and the first error.

    `unmoved` rows were already in the tier, so no bytes were moved. `rejection` is the error of
    single rows, which becomes the job's error only if all its rows failed. `gone` means that the
    whole tier did not answer: jobs queued earlier then fail in the same way.
    """

    failed: list[int] = field(default_factory=list)
    mismatches: int = 0
    unmoved: int = 0
    error: TierError | None = None
    rejection: TierError | None = None
    gone: bool = False

    def fail(self, row: Row, error: TierError) -> None:
        """Record that a row could not be moved."""
        self.failed.append(row.number)
        self.error = self.error or error

    def add(self, other: MoveResult) -> None:
        """Add the outcome of other rows of the same job."""
        self.failed += other.failed
        self.mismatches += other.mismatches
        self.unmoved += other.unmoved
        self.error = self.error or other.error
        self.rejection = self.rejection or other.rejection


class Mover(ABC):
    """Moves rows on one thread. Holds the tier and the arena."""

    @abstractmethod
    def move(self, direction: TierDirection, rows: Sequence[Row]) -> MoveResult:
        """Move at most a chunk of rows, which are in ascending order of tier slots."""
