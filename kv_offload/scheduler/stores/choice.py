"""Chooses the blocks to store from those that a step examines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.cache.slots import Run
from kv_offload.engine import BlockPool
from kv_offload.scheduler.request import StoreCursor
from kv_offload.scheduler.stores.candidates import Span

MAX_CHECKS = 4096
"""While GPU blocks are short, a plan checks at most this many of them for other holders."""


@dataclass(slots=True)
class Chosen:
    """New keys with their blocks; `along` has the slots of the same prefixes in host memory."""

    new: dict[SlotKey, None] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    runs: list[Span] = field(default_factory=list)
    """Sources of the new keys, in order: the first slot of each, and as many slots as it has new
    keys."""
    along: list[int] = field(default_factory=list)
    cut: list[tuple[Span, int]] = field(default_factory=list)
    """Spans that the budget cut short, each with the number of slots before the cut."""
    moved_on: int = 0
    """Number of blocks that were lost: they hold something else by now."""


@dataclass(eq=False, repr=False)
class StoreChoice:
    """Chooses blocks that host memory does not have and that are valid.

    A block is valid while the pool knows it under exactly the key that it is expected to have:
    requests have their hashes before the KV exists, and remembered ids go stale when a window moves
    on or a request is preempted.

    A block that did not fit a packed slot is not chosen again: it would not fit, and every request
    with its prefix would try it.
    """

    _prefixes: PrefixMap
    _pool: BlockPool
    _refused: Collection[SlotKey]

    def choose(
        self,
        spans: Sequence[Span],
        keys: Sequence[SlotKey],
        slots: Sequence[int],
        slots_left: int,
        lacking_blocks: int = 0,
    ) -> Chosen:
        """Choose at most `slots_left` of the slots of `spans`.

        `keys` are those of all spans in order, and `slots` those of the keys in the cache manager,
        -1 for a key that has none. Each request leaves at least `lacking_blocks` of its own blocks
        unpinned, since others lack as many and get them when it ends.
        """
        chosen = Chosen()
        new, blocks, along = chosen.new, chosen.blocks, chosen.along
        pool_blocks, refused = self._pool.blocks, self._refused
        suffixes = self._prefixes.pool_key_suffix
        end, checks, owner, room = 0, MAX_CHECKS, None, slots_left
        for span in spans:
            cursor, position, first, last = span
            if lacking_blocks and cursor is not owner:
                owner, enough = cursor, lacking_blocks + last - first
                room = -1
                looked_at = sum(min(enough, len(ids)) for ids in cursor.block_ids)
                if lacking_blocks < looked_at <= checks:
                    checks -= looked_at
                    room = min(slots_left, self._count_own(cursor, enough) - lacking_blocks)
            ids, suffix = cursor.block_ids[position], suffixes[position]
            begin, end = end, end + last - first
            offset, before, unknown = first - begin, len(new), -1
            for at in range(begin, end):
                slot = slots[at]
                if slot >= 0:
                    along.append(slot)
                    continue
                if unknown < 0:
                    unknown = at + offset
                key = keys[at]
                # Another request of this step may have the same prefix.
                if key in new or key in refused:
                    continue
                block = ids[at + offset]
                if pool_blocks[block].block_hash != key + suffix:
                    chosen.moved_on += self._count_lost(span, at + offset)
                elif room <= 0:
                    chosen.cut.append((span, at - begin))
                    break
                else:
                    slots_left -= 1
                    room -= 1
                    new[key] = None
                    blocks.append(block)
            if len(new) > before:
                chosen.runs.append((cursor, position, unknown, unknown + len(new) - before))
        return chosen

    def _count_lost(self, span: Span, slot: int) -> int:
        """Return 1 if the block of a slot was lost, 0 if the engine never names it."""
        cursor, position, _, _ = span
        if cursor.block_ids[position][slot] == self._pool.null_block.block_id:
            return 0  # the request never had a block there
        group, request = self._prefixes.groups[position], cursor.request
        return self._prefixes.count_named(group, [slot], request.num_prompt_tokens)

    def _count_own(self, cursor: StoreCursor, enough: int) -> int:
        """Count blocks that would be free without this request, up to about `enough` per group.

        Blocks that a window has left, or that a state has moved from, may be another request's.
        """
        blocks, null, own = self._pool.blocks, self._pool.null_block.block_id, 0
        for group, ids in zip(self._prefixes.groups, cursor.block_ids, strict=True):
            held = min(enough, group.held_blocks(len(ids)))
            own += sum(i != null and blocks[i].ref_cnt == 1 for i in ids[-held:])
        return own

    def runs_of(self, chosen: Chosen) -> list[Run]:
        """Return the runs of new keys; a run with a hint to retain it must be stored."""
        runs = []
        for cursor, position, first, last in chosen.runs:
            request, must = cursor.request, cursor.hints.keep is not None
            parent = self._prefixes.key_before(request.block_hashes, position, first)
            runs.append(Run(last - first, request.num_prompt_tokens, must, parent))
        return runs
