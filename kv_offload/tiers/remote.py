"""A store that other engines read and write too: nobody here decides what it keeps."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import Slots
from kv_offload.messages import TierCapacity
from kv_offload.scheduler.transfers import Transfer
from kv_offload.tiers.base import FIRST_PAUSE_SECONDS, Tier
from kv_offload.tiers.directory import RemoteAnswer, RemoteDirectory
from kv_offload.tiers.questions import Question

KNOWN_SECONDS = 30.0
"""A block that the store had at most so long ago is read without asking again."""

MAX_KNOWN_KEYS = 1 << 18
"""Maximum number of keys remembered as present in the remote store: some 50 MB."""

GENERATION_BYTES = 16
SHARED_GENERATION = bytes(GENERATION_BYTES)
"""Begins the names of blocks that all engines find."""


DirectoryOpener = Callable[[Sequence[str]], RemoteDirectory]
"""Opens a directory for ranks whose objects' keys begin so; equal beginnings are named once."""


class RecentKeys:
    """Keys that were added in the last `KNOWN_SECONDS` to twice as long, or since it grew."""

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._turned = time.monotonic()

    def _turn(self) -> None:
        now = time.monotonic()
        late = now - self._turned
        if late >= KNOWN_SECONDS or len(self._young) >= MAX_KNOWN_KEYS // 2:
            self._old = self._young if late < 2 * KNOWN_SECONDS else set()
            self._young, self._turned = set(), now

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys, also such as are there."""
        self._turn()
        self._young.update(keys)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Take keys out, as far as they are there."""
        for key in keys:
            self._young.discard(key)
            self._old.discard(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def has(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Say for each key whether it is there."""
        self._turn()
        young, old = self._young, self._old
        return np.array([key in young or key in old for key in keys], bool)


class RemoteTier(Tier):
    """Knows of keys what the store has answered recently, or what this engine has written to it.

    A key that was there may be gone: then its read brings nothing, and it is forgotten here.

    The blocks that all engines find have a name without a secret. After a reset, or new weights,
    this engine names its blocks by a secret of its own: others may still have the weights of
    before, and what they store must not be served here.
    """

    name, what = "remote", "remote store"
    is_shared = True

    def __init__(self, open_directory: DirectoryOpener) -> None:
        super().__init__()
        self._open_directory = open_directory
        self._directory: RemoteDirectory | None = None
        self._known = RecentKeys()
        self._generation = SHARED_GENERATION
        # Answers come in the order of the questions, so the last is open as long as any is.
        self._last_answer: RemoteAnswer | None = None
        self._is_late = False

    @property
    def is_open(self) -> bool:
        """See `Tier`."""
        return self._directory is not None

    def open(self, ranks: Mapping[int, TierCapacity]) -> None:
        """Take in how the ranks name their objects; ranks that share memory name them alike."""
        if self._directory is None:
            self._directory = self._open_directory(sorted({r.file_id for r in ranks.values()}))

    def close(self, timeout_seconds: float) -> None:
        """See `Tier`."""
        if self._directory is not None:
            self._directory.close(timeout_seconds)

    @property
    def _is_ready(self) -> bool:
        """See `Tier`: not while an answer is late."""
        return super()._is_ready and not (self._is_late and self.is_asked)

    @property
    def may_read(self) -> bool:
        """See `Tier`: not once a late answer has failed, until `next_step` makes that a pause."""
        return super().may_read and not self._late_answer_failed

    @property
    def _late_answer_failed(self) -> bool:
        """Return whether it did, and not so long ago that a pause would be over."""
        answer = self._last_answer
        if not self._is_late or answer is None or not answer.is_done or answer.found is not None:
            return False
        return time.monotonic() - answer.answered < FIRST_PAUSE_SECONDS

    @property
    def generation(self) -> bytes:
        """See `Tier`."""
        return self._generation

    def readable(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """See `Tier`."""
        return self._known.has(keys)

    def may_have(self, key: bytes) -> bool:
        """See `Tier`."""
        return key in self._known

    def ask(self, keys: Sequence[bytes], *, are_chained: bool) -> Question | None:
        """Ask the store for what is not known of these keys."""
        assert self._directory is not None, "the tier is not open"
        unknown = [key for key, known in zip(keys, self._known.has(keys), strict=True) if not known]
        if not unknown:
            return None
        names = [self._generation + key for key in unknown]
        answer = self._directory.ask(names, are_chained=are_chained)
        self._last_answer, self._is_late = answer, False
        return Question(self, unknown, answer)

    @property
    def is_asked(self) -> bool:
        """See `Tier`."""
        return self._last_answer is not None and not self._last_answer.is_done

    def take_answer(self, keys: Sequence[bytes], generation: bytes, answer: RemoteAnswer) -> None:
        """Take in an answer, or that it takes too long; `generation` began the names asked for."""
        if not answer.is_done:
            self._is_late = True
        elif answer.found is None:
            self.read_failed()
        elif generation == self._generation:  # else there was a reset meanwhile
            self._known.add(key for key, there in zip(keys, answer.found, strict=True) if there)

    def next_step(self, oldest: Iterable[Transfer], now: float) -> None:
        """See `Tier`."""
        super().next_step(oldest, now)
        if self._is_late and not self.is_asked:
            failed, self._is_late = self._late_answer_failed, False
            if failed:
                self.read_failed()

    def begin_write(self, keys: Sequence[bytes]) -> tuple[list[int], Slots]:
        """Write what is not known to be there. The ranks look before they send it."""
        rows = np.flatnonzero(~self._known.has(keys)).tolist()
        return rows, np.arange(len(rows), dtype=np.int32)

    def end_write(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """See `Tier`."""
        if move.generation == self._generation:
            self._known.add(key for key, bad in zip(move.keys, failed, strict=True) if not bad)

    def begin_read(self, keys: Sequence[bytes]) -> Slots:
        """See `Tier`. The store finds blocks by their names alone."""
        return np.arange(len(keys), dtype=np.int32)

    def end_read(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """See `Tier`."""
        self._known.discard(key for key, bad in zip(move.keys, failed, strict=True) if bad)

    def forget_all(self) -> bool:
        """Find nothing any more of what was stored, and let nobody find what is stored from now."""
        self._generation = secrets.token_bytes(GENERATION_BYTES)
        self._known = RecentKeys()
        return True

    def gauges(self) -> dict[str, float]:
        """See `Tier`."""
        return {"has_remote": 1.0}

    def check_integrity(self) -> None:
        """See `Tier`: nothing here has to fit what the store has."""
