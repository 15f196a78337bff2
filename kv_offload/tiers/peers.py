"""The host memory of other engines in the same host pool, as a tier that is only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.peers import PeerDirectories
from kv_offload.cache.slots import NO_SLOTS, Slots
from kv_offload.messages import TierCapacity
from kv_offload.scheduler.transfers import Transfer
from kv_offload.tiers.base import Tier
from kv_offload.tiers.remote import RecentKeys

PeersOpener = Callable[[Mapping[int, str]], PeerDirectories]
"""Finds the peers whose arenas match these, given as paths by rank."""


class PeerTier(Tier):
    """Looks keys up in the directories of the peers; each peer alone decides what it keeps.

    An entry may change before a rank reads its slot. Then that read fails, and the key is not
    looked up at peers again for a while.

    After a reset or new weights, this engine reads nothing from its peers: they may still hold KV
    that was computed before.
    """

    name, what = "peers", "host memory of other engines in the pool"

    def __init__(self, open_peers: PeersOpener) -> None:
        super().__init__()
        self._open_peers = open_peers
        self._host: LastingManager | None = None
        self._peers: PeerDirectories | None = None
        self._lost = RecentKeys()
        self._is_cut_off = False

    def share_with(self, host: LastingManager) -> None:
        """Have `host` leave out of this engine's host memory the blocks that peers have."""
        self._host = host
        host.share(self._keep)

    def _keep(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return for each key whether a peer has it, which counts as a use there."""
        return self._find(keys, uses=True) if self.may_read else np.zeros(len(keys), bool)

    @property
    def is_open(self) -> bool:
        """See `Tier`."""
        return self._peers is not None

    def open(self, ranks: Mapping[int, TierCapacity]) -> None:
        """See `Tier`."""
        if self._peers is None:
            self._peers = self._open_peers({rank: part.file_id for rank, part in ranks.items()})

    def close(self, timeout_seconds: float) -> None:
        """See `Tier`."""
        if self._peers is not None:
            self._peers.close()

    @property
    def _is_ready(self) -> bool:
        """See `Tier`: false while there are no peers."""
        return not self._is_cut_off and super()._is_ready and bool(self._peers and self._peers.all)

    @property
    def may_write(self) -> bool:
        """See `Tier`: an engine writes only its own memory."""
        return False

    @property
    def generation(self) -> bytes:
        """See `Tier`: blocks are addressed by their keys."""
        return b""

    def readable(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """See `Tier`."""
        return self._find(keys)

    def _find(self, keys: Sequence[bytes], *, uses: bool = False) -> NDArray[np.bool_]:
        if self._is_cut_off or self._peers is None or not len(keys):
            return np.zeros(len(keys), bool)
        found = self._peers.have(keys, uses=uses)
        if found.any():
            found &= ~self._lost.has(keys)
        return found

    def may_have(self, key: bytes) -> bool:
        """See `Tier`."""
        return bool(self.readable([key])[0])

    def begin_write(self, keys: Sequence[bytes]) -> tuple[list[int], Slots]:
        """See `Tier`: nothing is written."""
        return [], NO_SLOTS

    def end_write(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """See `Tier`: nothing was written."""

    def begin_read(self, keys: Sequence[bytes]) -> Slots:
        """See `Tier`. Each rank finds blocks by their keys."""
        return np.arange(len(keys), dtype=np.int32)

    def end_read(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """See `Tier`. Blocks read from peers are copies, which are evicted before other blocks."""
        self._lost.add(key for key, bad in zip(move.keys, failed, strict=True) if bad)
        if self._host is not None:
            self._host.are_copies(move.slots[~failed])

    def forget_all(self) -> bool:
        """See `Tier`."""
        had = not self._is_cut_off and self.is_open
        self._is_cut_off = True
        return had

    def gauges(self) -> dict[str, float]:
        """See `Tier`."""
        return {"peers": float(len(self._peers.all)) if self._is_ready and self._peers else 0.0}

    def check_integrity(self) -> None:
        """See `Tier`: there is no state to check."""
