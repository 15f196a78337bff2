"""Asks a remote store which blocks it has, on a separate thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kv_swap.tiers.remote.client import RemoteClient

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

START_SECONDS = 5.0
"""Maximum time that an engine's start waits for the connection. Without this wait, requests would
wait for it, and Mooncake blocks all Python threads while it connects."""


PATIENCE_SECONDS = 0.2
"""How long a request waits for an answer before it is served without one."""


@dataclass(slots=True, eq=False)
class Question:
    """A query for names in the store; if `are_chained`, each is useful only with all before it.

    `on_close` is called once, when the question has an answer or is late.
    """

    names: Sequence[bytes]
    are_chained: bool = False
    on_close: Callable[[Question], None] = lambda _: None
    found: Sequence[bool] | None = None
    """For each name, whether the store has all parts; None if the question failed."""
    answered: float = 0.0
    """Time of the answer, on the monotonic clock. Set last, by the directory's thread."""
    is_late: bool = False
    """True if it was closed without an answer."""
    _asked: float = field(default_factory=lambda: time.monotonic(), init=False)
    _closed: bool = field(default=False, init=False)

    @property
    def is_done(self) -> bool:
        """True if the directory has answered, or failed to."""
        return self.answered > 0

    def is_open(self) -> bool:
        """Return whether a request may wait for the answer, and close the question if not."""
        if not self._closed:
            waited = time.monotonic() - self._asked
            self.is_late = waited > PATIENCE_SECONDS and not self.is_done
            self._closed = self.is_done or self.is_late
            if self._closed:
                self.on_close(self)
        return not self._closed


class RemoteDirectory:
    """Answers questions in order. `close` is the only method that blocks.

    The constructor waits for a connection, a failed attempt, or `START_SECONDS`. Ranks that hold
    different bytes store a block in parts: each of `prefixes` begins the object keys of one part.
    `make_keys` makes object keys from a prefix and names.
    """

    def __init__(
        self,
        client: RemoteClient,
        prefixes: Sequence[str],
        make_keys: Callable[[str, Sequence[bytes]], list[str]],
    ) -> None:
        self._client = client
        self._make_keys = make_keys
        self._prefixes = prefixes
        self._queue: SimpleQueue[Question | None] = SimpleQueue()
        self._failing = False
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-offload-store", daemon=True)
        self._thread.start()
        self._tried.wait(START_SECONDS)

    def ask(self, question: Question) -> None:
        """Queue a question, to be answered after the earlier ones."""
        self._queue.put(question)

    def close(self, timeout_seconds: float) -> None:
        """End the thread, unless a call to the store hangs longer than the timeout."""
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        self._attempt(self._client.connect)
        self._tried.set()
        while (question := self._queue.get()) is not None:
            look = self._look_along if question.are_chained and self._client.probes else self._look
            question.found = self._attempt(partial(look, question.names))
            question.answered = time.monotonic()
        self._client.close()

    def _attempt(self, call: Callable[[], Found]) -> Found | None:
        """Call the store; None on failure, which is logged once until a call succeeds."""
        try:
            found = call()
        except Exception as error:  # noqa: BLE001 - any error counts as no answer
            if not self._failing:
                logger.warning("kv-offload: the remote store does not answer: %s", error)
            self._failing = True
            return None
        self._failing = False
        return found

    def _look_along(self, names: Sequence[bytes]) -> list[bool]:
        """Find how much of a chain the store has, with a few probes.

        The names before one that is there were written before it. The first name is always probed,
        as a store can remove it first. A thousand names take two rounds of probes.
        """
        probes = self._client.probes
        assert probes is not None
        first, last = 0, len(names)  # all before `first` are there, and `last` is not
        while first < last:
            count = min(probes, last - first) - 1
            rows = [first + (last - 1 - first) * at // max(1, count) for at in range(count + 1)]
            there = self._look([names[row] for row in rows])
            known = there.index(False) if False in there else len(rows)
            if known < len(rows):
                last = rows[known]
            if known:
                first = rows[known - 1] + 1
        return [row < first for row in range(len(names))]

    def _look(self, names: Sequence[bytes]) -> list[bool]:
        """Ask for the first part of all blocks, and for the next parts of those that have it."""
        found = [True] * len(names)
        for prefix in self._prefixes:
            rows = [row for row, there in enumerate(found) if there]
            if not rows:
                break
            part = self._client.exist(self._make_keys(prefix, [names[row] for row in rows]))
            for row, there in zip(rows, part, strict=True):
                found[row] = there
        return found
