"""Types, errors and a helper that the modules of the cache share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.errors import KVOffloadError

Key: TypeAlias = bytes
"""The name of a block's contents. Only a directory needs bytes: replayed traces have numbers."""

Slots: TypeAlias = NDArray[np.int32]
"""Slot numbers, shape `(n,)`. Arrays, because a prompt has thousands of blocks."""

Mask: TypeAlias = NDArray[np.bool_]
"""One truth value for each of some keys or slots, shape `(n,)`."""

Readers: TypeAlias = NDArray[np.int32]
"""By slot: how many loads read it, -1 while a store writes it, 0 if it is idle."""

NO_SLOTS: Slots = np.empty(0, np.int32)


class Run(NamedTuple):
    """Consecutive keys of one request."""

    keys: int
    """Number of keys."""
    prompt_tokens: int
    must: bool = False
    """True if the keys must be stored whatever they are worth."""
    parent: Key | None = None
    """The key before the run in the prompt; None if there is none or the run does not need it."""


Runs: TypeAlias = Sequence[Run]


class MissingKeyError(KVOffloadError, KeyError):
    """A key to be loaded is not readable."""


class MisuseError(KVOffloadError, RuntimeError):
    """The completed load or store was not running."""


def distinct(slots: Slots) -> Slots:
    """Return each slot once, in order of first occurrence."""
    if np.all(slots[1:] > slots[:-1]):
        return slots  # the slots of most prefixes are ascending
    _, first = np.unique(slots, return_index=True)
    return slots if len(first) == len(slots) else slots[np.sort(first)]
