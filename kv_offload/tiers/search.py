"""Looks requests up in host memory and lower tiers together, and begins the reads they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import Mask, distinct
from kv_offload.engine import Request
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.loads.decision import MARGIN
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.tiers.base import Tier
from kv_offload.tiers.reads import Read, Reads


class Search:
    """Finds the longest prefix that host memory and lower tiers have between them.

    `tiers` in its methods are those that may be read now, fastest first. Each block is read from
    the first that has it. If that tier turns out to have lost it, the shared tiers are asked.
    """

    def __init__(self, core: Core, tiers: Mapping[str, Tier], reads: Reads) -> None:
        self._prefixes, self._host, self._pool = core.prefixes, core.manager, core.engine.pool
        self._subscribers, self._slot_bytes = core.subscribers, core.slots.slot_bytes
        self._lookups, self._costs = core.lookups, core.costs
        self._tiers, self._reads = tiers, reads

    def find(self, tracked: TrackedRequest, start: int, tiers: Sequence[Tier]) -> Read | None:
        """Look a request up in host memory and `tiers`; return the read that it should wait for."""
        hashes = tracked.request.block_hashes
        limit = self._lookups.limit_tokens(tracked, start)
        read = self.on_its_way(tracked, start, limit, tiers)
        if read.end_tokens == start or self._has_more(hashes, read.end_tokens, limit, tiers):
            return self._begin(tracked.request, read, limit, tiers)
        return read if read.parts and self._is_worth_it(read, {}) else None

    def on_its_way(
        self, tracked: TrackedRequest, start: int, limit: int, tiers: Sequence[Tier]
    ) -> Read:
        """Return the part of a request that is being loaded or read for others that share it.

        With windows, states or proofs, an end is a hit only with the blocks before it: then the
        part is empty, or as long as it can be.
        """
        prefixes, hashes = self._prefixes, tracked.request.block_hashes
        nothing = Read(start, start, start, start, [])
        end = prefixes.end_within(self._lookups.arriving, hashes, start, limit)
        if end > start and self._lookups.loads_beginning_of(tracked, start) is not None:
            read = Read(start, end, end, end, [])
        elif (found := self._reads.find(hashes, start, limit)) is not None:
            end, read = found
        else:
            return nothing
        if prefixes.serves_whole_requests:
            read_end = end
        elif end == read.full_tokens and not self._has_more(hashes, end, limit, tiers):
            read_end = read.end_tokens
        else:
            return nothing
        hashed = prefixes.hashed_tokens(hashes, limit)
        if not start < read_end <= hashed or prefixes.chain_key(hashes, read_end) not in self._host:
            return nothing  # host memory was emptied since
        parts = [(first, transfer) for first, transfer in read.parts if first < read_end]
        return Read(start, read_end, end, min(read.host_tokens, read_end), parts)

    def exceeds_engine(self, hashes: Sequence[bytes], start: int, end: int) -> bool:
        """Return whether a prefix up to `end` is longer than the engine's own hit.

        The engine's hit has whole blocks up to `start`. It extends to `end` if the engine has the
        states there.
        """
        prefixes = self._prefixes
        if not (prefixes.tail_tokens and start == prefixes.align(end) < end):
            return prefixes.align(end) > start
        states = [group for group in prefixes.stored_groups if group.holds_state]
        (key,) = prefixes.tail_keys(hashes, states[0], end)
        ids = [group.group_id for group in states]
        return not self._pool.get_cached_block(prefixes.hash_of(states[0], key), ids)

    def in_engine(self, request: Request, end: int) -> Callable[[], object]:
        """Return what finds the last whole blocks of a prefix in the engine's own cache, in O(1).

        It returns None if the engine lacks them. If it has them it usually has those before them,
        too, since it evicts the end of a prefix first.
        """
        prefixes = self._prefixes
        whole = prefixes.align(min(end, request.num_tokens - 1))
        if not whole:
            return lambda: None
        block_hash = request.block_hashes[whole // self._pool.hash_block_size - 1]
        ids = [group.group_id for group in prefixes.stored_groups]
        return partial(self._pool.get_cached_block, block_hash, ids)

    def _has_more(
        self, hashes: Sequence[bytes], end: int, limit: int, tiers: Sequence[Tier]
    ) -> bool:
        """Return whether groups that read all tokens may have a prefix beyond `end`."""
        prefixes = self._prefixes
        next_end = end + prefixes.alignment_tokens
        if next_end > prefixes.hashed_end(hashes, limit):
            return False
        key = prefixes.chain_key(hashes, next_end)
        self._lookups.spend(1)
        return key in self._host or any(tier.may_have(key) for tier in tiers)

    def _begin(
        self, request: Request, known: Read, limit: int, tiers: Sequence[Tier]
    ) -> Read | None:
        """Look up the blocks after `known`, and read them; None if computing them is faster."""
        prefixes, hashes, start = self._prefixes, request.block_hashes, known.end_tokens
        readable = partial(self._readable, tiers)
        end, full = prefixes.longest_hits(hashes, readable, start, limit)
        if not self.exceeds_engine(hashes, known.start_tokens, end):
            return None
        keys = prefixes.needed_keys(hashes, start, end) if end > start else []
        host_slots = self._host.find(keys)
        absent = self._host.lacks(keys)
        missing = [key for key, gone in zip(keys, absent.tolist(), strict=True) if gone]
        first_tokens = prefixes.needed_tokens(start, end)
        parts = {transfer: first for first, transfer in known.parts}
        for row in np.flatnonzero(~absent).tolist():
            if (coming := self._reads.transfer_of(keys[row])) is not None:
                parts.setdefault(coming, int(first_tokens[row]))
        if not missing and not parts:
            return None
        host_end = known.host_tokens
        if host_end == start:
            host_end, _ = prefixes.longest_hits(hashes, self._lookups.readable, start, limit)
        read = Read(known.start_tokens, end, full, host_end, [])
        sources = self._locate(missing, tiers)
        if len(sources) < len(missing):
            return None  # a peer has lost a key since
        read.parts = [(first, transfer) for transfer, first in parts.items()]
        if not self._is_worth_it(read, Counter(sources)):
            return None
        parents = distinct(host_slots[self._host.holds(host_slots)])
        begun = self._reads.begin(missing, sources, parents)
        self._host.prepare_copy(parents)  # a quota must not evict the beginning of this prefix
        try:
            for notify in self._subscribers.promotions:
                notify(request, start, end, [transfer for transfer, _ in begun])
        finally:
            self._host.complete_load(parents)
        first_tokens = first_tokens[absent]
        read.parts += [(int(first_tokens[rows].min()), transfer) for transfer, rows in begun]
        num_begun = sum(len(rows) for _, rows in begun)
        if num_begun < len(missing):  # there was no room for the others
            read.end_tokens = read.full_tokens = min(end, int(first_tokens[num_begun:].min()))
        is_complete = prefixes.serves_whole_requests or num_begun == len(missing)
        if read.parts and read.end_tokens > start and is_complete:
            self._reads.share(read, hashes, start)
        return read if read.parts else None

    def _readable(self, tiers: Sequence[Tier], keys: Sequence[SlotKey]) -> Mask:
        """Return a mask of the keys that host memory has, or can get from `tiers`."""
        self._lookups.spend(len(keys))
        slots = self._host.find(keys)
        readable = self._host.readable(keys)
        if readable.all():
            return readable
        unknown = slots < 0
        for tier in tiers:
            readable |= unknown & tier.readable(keys)
        for row in np.flatnonzero(~readable & ~unknown).tolist():
            coming = self._reads.transfer_of(keys[row])
            readable[row] = coming is not None and self._reads.can_end(coming)
        return readable

    @staticmethod
    def _locate(keys: list[SlotKey], tiers: Sequence[Tier]) -> list[Tier]:
        """Return the first tier that has each key; fewer tiers if a key is now in none."""
        sources: dict[int, Tier] = {}
        for tier in reversed(tiers):
            for row in np.flatnonzero(tier.readable(keys)).tolist():
                sources[row] = tier
        return [sources[row] for row in sorted(sources)]

    def compute_seconds(self, read: Read) -> float | None:
        """Return the time to compute the tokens that host memory lacks; None without evidence."""
        return self._costs.compute_seconds(read.end_tokens - read.host_tokens)

    def _is_worth_it(self, read: Read, missing: Mapping[Tier, int]) -> bool:
        """Return whether to read `missing` more slots and load all of `read`, or compute instead.

        Tiers are read in parallel. Without evidence, and if it is close, the answer is to read.
        """
        computed = self.compute_seconds(read)
        tiers = {*missing, *(self._tiers[transfer.tier] for transfer in read.transfers)}
        seconds = 0.0
        for tier in tiers:
            speed = tier.rate.measured_bytes_per_second
            if not self._costs.measured or speed is None or computed is None:
                return True
            slots = tier.reading_slots + missing.get(tier, 0)
            seconds = max(seconds, slots * self._slot_bytes / speed)
        needed = self._prefixes.count_slots(read.start_tokens, read.end_tokens)
        seconds += self._costs.load_seconds(needed)
        # Occasionally a prefix is read anyway, to measure the tiers again.
        is_tried = any(tier.rate.is_to_be_tried for tier in tiers)
        is_worth_it = computed is None or computed * MARGIN >= seconds or is_tried
        for tier in tiers:
            tier.rate.count_hit(computed=not is_worth_it)
        return is_worth_it
