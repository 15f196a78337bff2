"""The types and errors that the modules of the cache share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.errors import KVOffloadError

Key: TypeAlias = Hashable
"""The name of a block's contents: opaque and hashable."""

Slots: TypeAlias = NDArray[np.int32]
"""Slot numbers, shape `(n,)`. Batches, because a prompt has thousands of blocks."""

NO_SLOTS: Slots = np.empty(0, np.int32)


class Run(NamedTuple):
    """Keys that follow each other and are of one request."""

    keys: int
    """How many."""
    prompt_tokens: int
    must: bool = False
    """True if they are to be stored whatever they are worth."""
    parent: Key | None = None
    """The key before them in the prompt; None where there is none, or they can do without it."""


Runs: TypeAlias = Sequence[Run]


class MissingKeyError(KVOffloadError, KeyError):
    """A load was asked for a key that is not readable."""


class MisuseError(KVOffloadError, RuntimeError):
    """A load or store was completed that does not run."""
