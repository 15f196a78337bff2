"""Looks up many keys concurrently in a store with high latency."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

ASKED_ALONE = 16
"""Up to this many keys are looked up one after the other in stores without wide-area latency."""


def in_parallel(
    ask: Callable[[str], bool], keys: Sequence[str], threads: int, alone: int = ASKED_ALONE
) -> list[bool]:
    """Call once per key, on several threads if there are more than `alone` keys.

    Raises the error of one of the calls after all of them have ended.
    """
    found = [False] * len(keys)
    rows = iter(range(len(keys)))
    turn = threading.Lock()
    errors: list[Exception] = []

    def work() -> None:
        while not errors:
            with turn:
                row = next(rows, None)
            if row is None:
                return
            try:
                found[row] = ask(keys[row])
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)

    if len(keys) <= alone:
        work()
    else:
        count = min(threads, len(keys))
        asking = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    if errors:
        raise errors[0]
    return found
