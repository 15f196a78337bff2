"""Keeps the facts about each block in host memory that announcements to routers need.

A store ends some steps after its plan, when its request may be gone, and a block may have to be
announced again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.cache.slots import Key, Slots
from kv_offload.engine import Request

Record: TypeAlias = tuple[SlotKey, int, SlotKey | None, bytes, Any]
"""Key, position of the cache group, parent's key, tokens, and the engine's own description.

A block that an earlier process left has only key and group. The garbage collector does not traverse
plain tuples of plain values, of which there can be a million."""

Describe: TypeAlias = Callable[[Request, int, int, int], Sequence[Any] | None]
"""Returns the engine's own description of each block beyond its tokens; None if it has none.

Takes the request, the first token, the end (exclusive), and the number of tokens per block."""


class BlockRecords:
    """The record of each slot, written when the slot is taken: about 200 bytes per block."""

    def __init__(self, prefixes: PrefixMap, describe: Describe) -> None:
        self._prefixes = prefixes
        self.describe = describe
        self._record_of: list[Record | None] = []  # by slot, up to the last used one

    def of(self, slot: int, key: Key) -> Record | None:
        """Return the record of a slot if it is about this key; else None."""
        record = self._record_of[slot] if slot < len(self._record_of) else None
        return record if record is not None and record[0] == key else None

    def take_over(
        self, source: BlockRecords, keys: Sequence[SlotKey], slots: Slots, own_slots: Slots
    ) -> None:
        """Copy the records of these keys from `slots` of `source` to `own_slots`."""
        self._make_room(int(own_slots.max(initial=-1)))
        for key, slot, own in zip(keys, slots.tolist(), own_slots.tolist(), strict=True):
            self._record_of[own] = source.of(slot, key)

    def _make_room(self, last_slot: int) -> None:
        self._record_of += [None] * (last_slot + 1 - len(self._record_of))

    def remember(
        self,
        request: Request,
        position: int,
        first: int,
        keys: Sequence[SlotKey],
        slot_of: Mapping[SlotKey, int],
    ) -> None:
        """Remember a group's blocks whose keys are in `slot_of`; `keys` start at block `first`."""
        known = [at for at, key in enumerate(keys) if key in slot_of]
        if not known:  # as for a chunk that begins where a hit ends
            return
        keys, first = keys[known[0] : known[-1] + 1], first + known[0]
        group = self._prefixes.groups[position]
        size, last = group.block_tokens, first + len(keys)
        before = self._prefixes.slot_keys(request.block_hashes, group, first - 1, first)
        parents = [before[0] if first else None, *keys[:-1]]
        tokens = array("i", request.all_token_ids[first * size : last * size]).tobytes()
        descriptions = self.describe(request, first * size, last * size, size) or [None] * len(keys)
        step = len(tokens) // len(keys)
        self._make_room(max(slot_of.get(key, 0) for key in keys))
        for at, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            if (slot := slot_of.get(key)) is None:
                continue
            of_block = tokens[at * step : (at + 1) * step]
            self._record_of[slot] = (key, position, parent, of_block, descriptions[at])
