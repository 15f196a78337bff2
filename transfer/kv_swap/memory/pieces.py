"""A mapping in pieces, each of which is page-locked by one registration."""

from __future__ import annotations

import logging
from typing import Protocol

from kv_swap.memory.mapping import Mapping

logger = logging.getLogger(__name__)

_LEAKED: list[Mapping] = []
"""Memory that could not be unregistered: it is never unmapped, the device might still write it."""


class PinnedRegistrar(Protocol):
    """Page-locks memory for a device, on several threads, one at a time for one arena.

    Both calls raise `RuntimeError` if they fail.
    """

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock `nbytes` from `address`; may take seconds."""

    def unregister(self, address: int) -> None:
        """Undo the `register` of the same address."""


class Pieces:
    """The registrations of one mapping, which belongs to this object. One thread at a time."""

    def __init__(self, mapping: Mapping, registrar: PinnedRegistrar, piece_bytes: int) -> None:
        self.count = -(-mapping.nbytes // piece_bytes)
        self.ready_bytes = 0
        """Bytes from the first on that are registered without a gap; any thread may ask."""
        self._mapping = mapping
        self._registrar = registrar
        self._piece_bytes = piece_bytes
        self._registered: set[int] = set()

    def range(self, piece: int) -> tuple[int, int]:
        """Return where a piece begins and ends."""
        start = piece * self._piece_bytes
        return start, min(start + self._piece_bytes, self._mapping.nbytes)

    def lock(self, piece: int) -> None:
        """Register a piece; raises what the registrar raises."""
        start, end = self.range(piece)
        self._registrar.register(self._mapping.address + start, end - start)
        self._registered.add(piece)
        ready = self.ready_bytes // self._piece_bytes
        while ready in self._registered:
            self.ready_bytes = self.range(ready)[1]
            ready += 1

    def unlock_behind_gap(self) -> None:
        """Unregister the pieces behind `ready_bytes`, and give their pages back."""
        ready = -(-self.ready_bytes // self._piece_bytes)
        if self._unregister([piece for piece in self._registered if piece >= ready]):
            self._mapping.discard(self.ready_bytes)

    def close(self) -> None:
        """Unregister all and unmap; what cannot be unregistered stays mapped for good."""
        if self._unregister(sorted(self._registered)):
            self._mapping.close()
        else:
            _LEAKED.append(self._mapping)

    def _unregister(self, pieces: list[int]) -> bool:
        """Undo the registration of pieces; False if one is left."""
        done = True
        for piece in pieces:
            address = self._mapping.address + self.range(piece)[0]
            try:
                self._registrar.unregister(address)
            except RuntimeError:
                logger.exception("cannot unregister host memory at %#x; it stays mapped", address)
                done = False
            else:
                self._registered.discard(piece)
        return done
