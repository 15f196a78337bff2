"""The types that name blocks and slots."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Key: TypeAlias = Hashable
"""The name of a block's contents: opaque and hashable."""

Slots: TypeAlias = NDArray[np.int32]
"""Slot numbers, shape `(n,)`. Batches, because a prompt has thousands of blocks."""

NO_SLOTS: Slots = np.empty(0, np.int32)
