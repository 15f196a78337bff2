"""Shuts an engine down with more patience than vLLM has."""

from __future__ import annotations

import contextlib
from typing import Any

PATIENCE_SECONDS = 30
"""vLLM's own 5 s are over when a busy machine has stood still once; then it kills its processes."""


def shut_down(llm: Any) -> None:
    """Shut an engine (`vllm.LLM`) down, its processes too."""
    import psutil

    # vLLM also kills a core that ends just now, and fails when a child of it is gone before it is
    # named. `kill_group` ends whatever that leaves.
    with contextlib.suppress(psutil.NoSuchProcess):
        llm.llm_engine.engine_core.shutdown(timeout=PATIENCE_SECONDS)
