"""The shared store of a replica, and a rank's way to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_swap.engine import SwapEngine

from kv_offload.config.sizes import format_size
from kv_offload.worker.sharing import Peers

if TYPE_CHECKING:
    from kv_swap.tiers.store.client import StoreClient
    from kv_swap.tiers.store.tier import StoreTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Store:
    """The store of one replica, whose ranks divide the memory that the replica gives to it.

    `contents` names all that changes the bytes of a block, or what its key means.
    """

    master: str
    nbytes: int
    contents: Mapping[str, str]

    def make_client(self, segment_bytes: int) -> StoreClient:
        """Return a client that gives `segment_bytes` of memory to the store."""
        from kv_swap.tiers.store.mooncake import MooncakeClient

        return MooncakeClient(self.master, segment_bytes)

    def open(
        self, rank: int, num_ranks: int, peers: Peers, pages: str, transfer: SwapEngine
    ) -> StoreTier:
        """Return a rank's way to the store; `pages` says what is where in a slot.

        It connects on its own: an engine starts also while the store is away.
        """
        from kv_swap.tiers.store.tier import StoreTier

        # Ranks that share memory hold the same bytes: they are one part of a block.
        part = f"{rank - peers.index} of {num_ranks}, kept for {peers.count}"
        description = {**self.contents, "part": part, "pages": pages}
        segment_bytes = self.nbytes // num_ranks
        logger.info(
            "kv-offload: rank %d gives %s to the store at %s, and keeps blocks there",
            rank,
            format_size(segment_bytes),
            self.master,
        )
        return StoreTier(self.make_client(segment_bytes), transfer.slots(), description)
