"""The log of a rank."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """Writes to the engine's log; every line names the plugin and the rank."""

    def __init__(self, logger: logging.Logger, rank: int) -> None:
        super().__init__(logger, {})
        self._prefix = f"kv-offload: rank {rank}: "

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the prefix in front of a message."""
        return f"{self._prefix}{msg}", kwargs
