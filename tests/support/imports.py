"""What tests of an engine spend most time on is not the engine: imports, and collections of them.

vLLM's imports take 6 s, and each garbage collection looks at the half million objects that they
leave. vLLM collects several times as an engine starts and ends.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Keep all that is there now out of garbage collections: an engine's life takes 0.3 s, not 3 s.

    vLLM freezes the heap while an engine runs, and thaws all of it in the end: neither happens
    meanwhile, so that a collection sees what engines left, and only that. Forked processes inherit
    this.
    """
    freeze, unfreeze = gc.freeze, gc.unfreeze
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):
        freeze()
        try:
            yield
        finally:
            unfreeze()
