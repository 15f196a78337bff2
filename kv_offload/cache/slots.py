"""The types and errors that the modules of the cache share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.errors import KVOffloadError

Key: TypeAlias = Hashable
"""The name of a block's contents: opaque and hashable."""

Slots: TypeAlias = NDArray[np.int32]
"""Slot numbers, shape `(n,)`. Batches, because a prompt has thousands of blocks."""

NO_SLOTS: Slots = np.empty(0, np.int32)


class MissingKeyError(KVOffloadError, KeyError):
    """A load was asked for a key that is not readable."""


class MisuseError(KVOffloadError, RuntimeError):
    """A load or store was completed that does not run."""
