"""Turns changes of host memory or a disk into announcements for routers, limited per step."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np

from kv_offload.cache.manager import CacheManager, Change, ChangeLog
from kv_offload.cache.prefix import CacheGroup, PrefixMap, SlotKey
from kv_offload.cache.slots import Slots
from kv_offload.engine import Request
from kv_offload.scheduler.events.records import BlockRecords, Describe, Record
from kv_offload.scheduler.stores.candidates import Span, keys_of_spans
from kv_offload.scheduler.transfers import Transfer

MAX_STORED = 1024
MAX_REMOVED = 4096
"""Maximum blocks that one step announces. The rest follows in the next steps."""

MAX_LOOKS = 256
"""Maximum parents of held-back blocks that one step checks. A hanging copy can hold back tens of
thousands of blocks: all descendants of the blocks that it brings."""


@dataclass(slots=True)
class BlocksStored:
    """Consecutive blocks of a prefix that can be loaded now.

    - `parent`: hash of the block before the first; None at the beginning of a prompt.
    - `tokens`: empty for blocks that an earlier process left, of which only the hashes are known.
    - `descriptions`: the engine's own description of each block.
    - `tier`: the name of their tier; empty for host memory.
    """

    group: CacheGroup
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    descriptions: list[Any]
    tier: str = ""


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks that can no longer be loaded."""

    group: CacheGroup
    hashes: list[bytes]
    tier: str = ""


Announcement: TypeAlias = BlocksStored | BlocksRemoved
Run: TypeAlias = list[tuple[int, Record]]
"""Slots that hold consecutive blocks of a prefix, with their records."""


class Announcer:
    """Announces each block that becomes readable or is dropped.

    Changes are announced in order, so a router that applies all of them knows which blocks are
    readable. A child block is announced after its parent. A block that is gone before its turn is
    not announced.

    A block that an earlier process left is announced by its hash, and again with its tokens once a
    request has loaded it.
    """

    def __init__(
        self, manager: CacheManager, prefixes: PrefixMap, describe: Describe, tier: str = ""
    ) -> None:
        manager.changes = self._log = ChangeLog()
        self._tier = tier
        self._manager = manager
        self._prefixes = prefixes
        self._records = BlockRecords(prefixes, describe)
        # By slot, the record that routers know; up to the last slot that was announced.
        self._announced: list[Record | None] = []
        self._is_again = bytearray(manager.num_slots)
        """By slot, 1 if it must be announced again."""
        self.held_back: OrderedDict[SlotKey, deque[Slots]] = OrderedDict()
        """By parent's key, readable slots whose parent block has not been announced yet."""
        # Parents' keys that were announced, or are gone.
        self._released: deque[SlotKey] = deque()
        self._stored_left = 0

    def stores_planned(
        self, spans: Iterable[Span], keys: Sequence[SlotKey], new: Sequence[SlotKey], slots: Slots
    ) -> None:
        """Remember the blocks whose stores are planned; see `Subscribers.stores`."""
        slot_of = dict(zip(new, slots.tolist(), strict=False))
        for cursor, position, first, own in keys_of_spans(spans, keys):
            self._records.remember(cursor.request, position, first, own, slot_of)

    def promoted(
        self, request: Request, start_tokens: int, end_tokens: int, moves: Sequence[Transfer]
    ) -> None:
        """Remember a prefix's blocks, in a range of tokens, that are read from lower tiers."""
        pairs = (zip(move.keys, move.slots.tolist(), strict=True) for move in moves)
        slot_of: dict[SlotKey, int] = dict(chain.from_iterable(pairs))
        if not slot_of:
            return
        prefixes = self._prefixes
        for position, group in enumerate(prefixes.groups):
            slots = prefixes.needed_slots(group, start_tokens, end_tokens)
            keys = prefixes.slot_keys(request.block_hashes, group, slots.start, slots.stop)
            self._records.remember(request, position, slots.start, keys, slot_of)

    def below(self, manager: CacheManager, tier: str) -> Announcer:
        """Return an announcer for a tier whose blocks come from the slots of this one."""
        return Announcer(manager, self._prefixes, self._records.describe, tier)

    def demoted(self, above: Announcer, moves: Sequence[Transfer]) -> None:
        """Remember the blocks written to this tier from host memory, which `above` announces."""
        for move in moves:
            if move.tier == self._tier:
                self._records.take_over(above._records, move.keys, move.slots, move.tier_slots)

    def learn(self, request: Request, end_tokens: int) -> None:
        """Announce, with tokens, the blocks of a request's prefix that an earlier process left."""
        if not self._log.restored:
            return
        for position, group in enumerate(self._prefixes.groups):
            end = end_tokens // group.block_tokens
            keys = self._prefixes.slot_keys(request.block_hashes, group, 0, end)
            pairs = zip(keys, self._manager.slot_numbers(keys), strict=True)
            slot_of = {key: slot for key, slot in pairs if slot in self._log.restored}
            self._records.remember(request, position, 0, keys, slot_of)
            self._log.became_readable(np.array([*slot_of.values()], np.int32))

    def engine_was_reset(self) -> None:
        """Announce everything again: the engine's reset made some routers forget it."""
        known = [slot for slot, record in enumerate(self._announced) if record is not None]
        slots = np.array(known, np.int32)
        np.frombuffer(self._is_again, np.uint8)[slots] = 1
        self._log.became_readable(slots)

    @property
    def has_more(self) -> bool:
        """True if `take` has something to announce now, except blocks that wait for a copy."""
        if self._log.changes or self._released:
            return True
        return any(not self._is_coming(key) for key in islice(self.held_back, MAX_LOOKS))

    def take(self) -> list[Announcement]:
        """Return the announcements of this step."""
        announced = list(self._take()) if self.has_more else []
        if len(self.held_back) > MAX_LOOKS:
            for key in [*islice(self.held_back, MAX_LOOKS)]:
                self.held_back.move_to_end(key)  # the others are next
        return announced

    def _take(self) -> Iterator[Announcement]:
        self._stored_left, removed_left = MAX_STORED, MAX_REMOVED
        changes = self._log.changes
        while changes:
            change = changes.popleft()
            slots = change.slots
            if slots is None:
                slots = np.arange(len(self._announced), dtype=np.int32)
            left = self._stored_left if change.readable else removed_left
            if len(slots) > left:
                changes.appendleft(Change(slots[left:], change.readable))
                slots = slots[:left]
            if change.readable:
                self._stored_left -= len(slots)
                yield from self._store(slots)
            else:
                removed_left -= len(slots)
                yield from self._remove(slots)
            if self._stored_left <= 0 or removed_left <= 0:
                return
        yield from self._release()

    def _remove(self, slots: Slots) -> Iterator[BlocksRemoved]:
        """Announce that the blocks that routers know in these slots are gone.

        A block that was stored again may already be announced in its new slot: it stays known.
        """
        announced, groups = self._announced, self._prefixes.groups
        known = [(slot, announced[slot]) for slot in slots.tolist() if slot < len(announced)]
        gone = [(slot, record) for slot, record in known if record is not None]
        slots_now = self._manager.slot_numbers([record[0] for _, record in gone])
        hashes: list[list[bytes]] = [[] for _ in groups]
        for (slot, (key, position, *_)), slot_now in zip(gone, slots_now, strict=True):
            announced[slot] = None
            self._is_again[slot] = 0
            self._log.restored.discard(slot)
            if not self._is_announced(key, slot_now):
                hashes[position].append(self._prefixes.hash_of(groups[position], key))
        for group, of_group in zip(groups, hashes, strict=True):
            if of_group:
                yield BlocksRemoved(group, of_group, self._tier)

    def _store(self, slots: Slots) -> Iterator[BlocksStored]:
        """Announce the blocks in these slots that routers do not know, or must receive again."""
        announced = self._announced
        runs: list[Run] = []
        run_before: dict[SlotKey, Run] = {}  # by the key at its end
        keys = self._manager.readable_keys(slots)
        without_tokens: dict[int, list[bytes]] = {}
        for slot, key in zip(slots.tolist(), keys, strict=True):
            if slot >= len(announced):
                announced += [None] * (slot + 1 - len(announced))
            if key is None:
                continue
            found, known = self._records.of(slot, key), announced[slot]
            # A block without a record is from an earlier process.
            record = found or (key, self._prefixes.position_of(key), None, b"", None)
            if known is not None and known[0] != key:
                continue  # the removal of the slot's previous block comes first
            if known == record and not self._is_again[slot]:
                continue
            if not record[3]:
                self._mark_announced(slot, record)
                group = self._prefixes.groups[record[1]]
                without_tokens.setdefault(record[1], []).append(self._prefixes.hash_of(group, key))
                continue
            parent = record[2]
            run = None if parent is None else run_before.pop(parent, None)
            if run is None:
                run = []
                runs.append(run)
            run.append((slot, record))
            run_before[record[0]] = run
        for position, hashes in without_tokens.items():
            group = self._prefixes.groups[position]
            yield BlocksStored(group, hashes, None, [], [], self._tier)
        parents = [run[0][1][2] for run in runs]
        places = iter(self._manager.slot_numbers([p for p in parents if p is not None]))
        for run, parent in zip(runs, parents, strict=True):
            if parent is not None and self._waits_for(parent, next(places)):
                held = np.array([slot for slot, _ in run], np.int32)
                self.held_back.setdefault(parent, deque()).append(held)
            else:
                yield self._announce(run)

    def _announce(self, run: Run) -> BlocksStored:
        for slot, record in run:
            self._log.restored.discard(slot)
            self._mark_announced(slot, record)
        _, position, parent, _, _ = run[0][1]
        group, hash_of = self._prefixes.groups[position], self._prefixes.hash_of
        tokens = array("i", b"".join(record[3] for _, record in run))
        hashes = [hash_of(group, record[0]) for _, record in run]
        before = None if parent is None else hash_of(group, parent)
        descriptions = [record[4] for _, record in run]
        return BlocksStored(group, hashes, before, tokens.tolist(), descriptions, self._tier)

    def _mark_announced(self, slot: int, record: Record) -> None:
        self._announced[slot] = record
        self._is_again[slot] = 0
        if record[0] in self.held_back:
            self._released.append(record[0])

    def _is_coming(self, key: SlotKey) -> bool:
        (slot,) = self._manager.slot_numbers([key])
        return self._waits_for(key, slot)

    def _waits_for(self, key: SlotKey, slot: int) -> bool:
        """Return whether this key will still be announced as loadable."""
        if self._is_announced(key, slot):
            return bool(self._is_again[slot])
        return slot >= 0 and self._records.of(slot, key) is not None

    def _is_announced(self, key: SlotKey, slot: int) -> bool:
        """Return whether this key was announced in a slot, its own; -1 if it has none."""
        known = self._announced[slot] if 0 <= slot < len(self._announced) else None
        return known is not None and known[0] == key

    def _release(self) -> Iterator[BlocksStored]:
        """Announce the held-back blocks whose parents were announced or are gone."""
        if not self._released:
            looked_at = islice(self.held_back, MAX_LOOKS)
            self._released += [key for key in looked_at if not self._is_coming(key)]
        while self._released and self._stored_left > 0:
            key = self._released[0]
            held = self.held_back.get(key)
            if held is None or self._is_coming(key):  # the parent is stored again
                self._released.popleft()
                continue
            # One by one: all prompts that share a prefix can wait for its last block.
            slots = held.popleft()
            if not held:
                del self.held_back[key]
            self._stored_left -= len(slots)
            yield from self._store(slots)
