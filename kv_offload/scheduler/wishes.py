"""Reads what requests wish, where a front end has not refused what cannot be read."""

from __future__ import annotations

import logging

from kv_offload.engine import Request
from kv_offload.errors import RequestError
from kv_offload.scheduler.statistics import Statistics
from kv_offload.wishes import NO_WISHES, Wishes, read_wishes

logger = logging.getLogger(__name__)


class WishReader:
    """Reads the wishes of each request once, and counts them."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._warned = False

    def read(self, request: Request) -> Wishes:
        """Return what a request wishes; nothing where that is wrong, which is counted."""
        if not request.kv_transfer_params:
            return NO_WISHES
        try:
            wishes = read_wishes(request.kv_transfer_params, request.cache_salt)
        except RequestError as error:
            self._statistics.count("ignored_wishes", 1)
            if not self._warned:  # a client may send thousands
                self._warned = True
                logger.warning(
                    "%s. The request came past the check of vLLM's front end and was served as if "
                    "it had no wishes; others like it are only counted (ignored_wishes)",
                    error,
                )
            return NO_WISHES
        self._statistics.count("requests_with_wishes", wishes is not NO_WISHES)
        return wishes
