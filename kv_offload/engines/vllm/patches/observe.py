"""Has a MultiConnector of vLLM up to 0.31 take its members' figures as other versions send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def observe_dictionaries(
    original: Callable[..., Any], self: Any, transfer_stats_data: Any, engine_idx: int = 0
) -> Any:
    """Run around `MultiKVConnectorPromMetrics.observe`."""
    figures = transfer_stats_data.items()
    as_sent = {k: v if isinstance(v, dict) else {"data": v.data} for k, v in figures}
    return original(self, as_sent, engine_idx)
