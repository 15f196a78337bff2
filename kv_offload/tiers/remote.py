"""The remote store: a tier that engines share, and that decides itself which blocks it keeps."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

import numpy as np

from kv_offload.cache.slots import Mask, Slots
from kv_offload.messages import TierCapacity
from kv_offload.scheduler.transfers import Transfer
from kv_offload.tiers.base import FIRST_PAUSE_SECONDS, Tier
from kv_offload.tiers.directory import Question, RemoteDirectory

KNOWN_SECONDS = 30.0
"""How long a block is read without asking again, after the store was known to have it."""

MAX_KNOWN_KEYS = 1 << 18
"""Maximum number of keys remembered as present in the remote store: some 50 MB."""

GENERATION_BYTES = 16
SHARED_GENERATION = bytes(GENERATION_BYTES)
"""Prefix of the names of blocks that all engines can find."""


DirectoryOpener = Callable[[Sequence[str]], RemoteDirectory]
"""Opens a directory. Takes the distinct prefixes of the ranks' object keys."""


class RecentKeys(OrderedDict[bytes, float]):
    """The time until which each key is remembered: `KNOWN_SECONDS` after it was last added."""

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys; drop the expired ones, and the oldest above `MAX_KNOWN_KEYS`."""
        now = time.monotonic()
        until = now + KNOWN_SECONDS
        for key in keys:
            self[key] = until
            self.move_to_end(key)
        while self and (len(self) > MAX_KNOWN_KEYS or next(iter(self.values())) < now):
            self.popitem(last=False)

    def has(self, keys: Sequence[bytes]) -> Mask:
        """Return a mask of the keys that are remembered."""
        now, get = time.monotonic(), self.get
        return np.array([get(key, -1.0) >= now for key in keys], bool)


class RemoteTier(Tier):
    """Remembers the keys that the store recently reported, or that this engine has written.

    If the store has dropped a key since, reading it fails, and it is dropped here, too.

    Blocks that all engines can find have names without a secret. After a reset or new weights, this
    engine adds its own secret to names: other engines may still have the old weights, and their
    blocks must not be served here.
    """

    name, what = "remote", "remote store"
    is_shared = True

    def __init__(self, open_directory: DirectoryOpener) -> None:
        super().__init__()
        self._open_directory = open_directory
        self._directory: RemoteDirectory | None = None
        self._known = RecentKeys()
        self._generation = SHARED_GENERATION
        # Answers come in the order of the questions, so the last one is open as long as any is.
        self._last_question: Question | None = None
        self._is_late = False

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    def open(self, ranks: Mapping[int, TierCapacity]) -> None:
        """Open the directory. Ranks that share memory have the same names for their objects."""
        if self._directory is None:
            self._directory = self._open_directory(sorted({r.file_id for r in ranks.values()}))

    def close(self, timeout_seconds: float) -> None:
        if self._directory is not None:
            self._directory.close(timeout_seconds)

    @property
    def _is_ready(self) -> bool:
        """See `Tier`; False while an answer is late."""
        return super()._is_ready and not (self._is_late and self.is_asked)

    @property
    def may_read(self) -> bool:
        """See `Tier`; False after a late answer failed, until `next_step` makes that a pause."""
        return super().may_read and not self._late_answer_failed

    @property
    def _late_answer_failed(self) -> bool:
        """True if the last answer was a late error, and a pause for it would not be over yet."""
        last = self._last_question
        if not self._is_late or last is None or not last.is_done or last.found is not None:
            return False
        return time.monotonic() - last.answered < FIRST_PAUSE_SECONDS

    @property
    def generation(self) -> bytes:
        return self._generation

    def readable(self, keys: Sequence[bytes]) -> Mask:
        return self._known.has(keys)

    def may_have(self, key: bytes) -> bool:
        return key in self._known

    def ask(self, keys: Sequence[bytes], *, are_chained: bool) -> Question | None:
        """Ask the store for the keys that are not remembered. See `Tier`."""
        assert self._directory is not None, "the tier is not open"
        unknown = [key for key, known in zip(keys, self._known.has(keys), strict=True) if not known]
        if not unknown:
            return None
        names = [self._generation + key for key in unknown]
        self._last_question = Question(names, are_chained, self._take_answer)
        self._is_late = False
        self._directory.ask(self._last_question)
        return self._last_question

    @property
    def is_asked(self) -> bool:
        return self._last_question is not None and not self._last_question.is_done

    def _take_answer(self, question: Question) -> None:
        """Apply an answer, or note that it is late."""
        if not question.is_done:
            self._is_late = True
        elif question.found is None:
            self.read_failed()
        elif question.names[0].startswith(self._generation):  # else there was a reset meanwhile
            keys = [name[GENERATION_BYTES:] for name in question.names]
            self._known.add(compress(keys, question.found))

    def next_step(self, oldest: Iterable[Transfer], now: float) -> None:
        super().next_step(oldest, now)
        if self._is_late and not self.is_asked:
            failed, self._is_late = self._late_answer_failed, False
            if failed:
                self.read_failed()

    def begin_write(self, keys: Sequence[bytes]) -> tuple[list[int], Slots]:
        """Choose the keys that the store is not known to have. Ranks check before they write."""
        rows = np.flatnonzero(~self._known.has(keys)).tolist()
        return rows, np.arange(len(rows), dtype=np.int32)

    def end_write(self, move: Transfer, failed: Mask) -> None:
        if move.generation == self._generation:
            self._known.add(compress(move.keys, (~failed).tolist()))

    def begin_read(self, keys: Sequence[bytes]) -> Slots:
        """See `Tier`. The store finds blocks by their names alone."""
        return np.arange(len(keys), dtype=np.int32)

    def end_read(self, move: Transfer, failed: Mask) -> None:
        for key in compress(move.keys, failed.tolist()):
            self._known.pop(key, None)

    def forget_all(self) -> bool:
        """Drop all keys, and hide blocks stored from now on from other engines. See `Tier`."""
        self._generation = secrets.token_bytes(GENERATION_BYTES)
        self._known = RecentKeys()
        return True

    def gauges(self) -> dict[str, float]:
        return {"has_remote": 1.0}
