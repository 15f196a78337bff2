"""Stores the blocks inside which a prefix ends, if the engine has kept the states at its end.

The engine names these states once: in the step that copies them to separate blocks, or at the end
of a request that stops there. The request still writes the other blocks, but only after that end,
and nothing reads the copy of that part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.engine import BlockPool
from kv_offload.scheduler.request import StoreCursor
from kv_offload.scheduler.stores.candidates import Span, StoreCandidates

LEAST_SHARE = 8
"""A tail is stored if it has at least 1 in 8 of a block's tokens, since it takes whole slots."""


@dataclass(slots=True)
class Tail:
    """The blocks of a request inside which a prefix ends: a span, a key and a block id for each."""

    cursor: StoreCursor
    spans: list[Span] = field(default_factory=list)
    keys: list[SlotKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class StoreTails:
    """Finds the tails to store: all blocks of one are stored, or none."""

    def __init__(
        self,
        prefixes: PrefixMap,
        pool: BlockPool,
        candidates: StoreCandidates,
        refused: Collection[SlotKey],
    ) -> None:
        self._prefixes, self._pool = prefixes, pool
        self._candidates, self._refused = candidates, refused

    def find(
        self,
        cursor: StoreCursor,
        computed_tokens: int,
        states: Sequence[tuple[int, int, int]],
        block_ids: Sequence[Sequence[int]],
    ) -> Iterator[Tail]:
        """Yield the tails of a request for which the engine has all states.

        `states` are cache groups, blocks and numbers of tokens; `block_ids` is the request's block
        table. `computed_tokens` are computed before the stores run.
        """
        if not self._prefixes.tail_tokens:
            return
        for end_tokens in {tokens for _, _, tokens in states}:
            if self._is_wanted(cursor, computed_tokens, end_tokens):
                state_of = {group: block for group, block, tokens in states if tokens == end_tokens}
                tail = self._collect(cursor, end_tokens, state_of, block_ids)
                if tail is not None:
                    yield tail

    def _is_wanted(self, cursor: StoreCursor, computed_tokens: int, end_tokens: int) -> bool:
        """Return whether a tail is worth its slots, and the proof that it may need is computed.

        The key of a proof may be that of the whole block.
        """
        block_tokens = self._prefixes.alignment_tokens
        if end_tokens % block_tokens * LEAST_SHARE < block_tokens:
            return False
        proof_tokens = self._prefixes.proof_tokens
        if proof_tokens:
            proof_tokens += self._prefixes.unnamed_tokens
        return (
            end_tokens + proof_tokens <= computed_tokens
            and self._candidates.wanted(cursor, end_tokens) == end_tokens
        )

    def _collect(
        self,
        cursor: StoreCursor,
        end_tokens: int,
        state_of: dict[int, int],
        block_ids: Sequence[Sequence[int]],
    ) -> Tail | None:
        """Return a tail; None without the states of all groups, or if a block was refused."""
        prefixes, blocks = self._prefixes, self._pool.blocks
        tail = Tail(cursor)
        for position, group in enumerate(prefixes.groups):
            slot = end_tokens // group.block_tokens
            for key in prefixes.tail_keys(cursor.request.block_hashes, group, end_tokens):
                if key in self._refused:
                    return None
                block = block_ids[position][slot]
                if group.holds_state:
                    block = state_of.get(group.group_id, self._pool.null_block.block_id)
                    if blocks[block].block_hash != key + prefixes.pool_key_suffix[position]:
                        return None
                tail.spans.append((cursor, position, slot, slot + 1))
                tail.keys.append(key)
                tail.blocks.append(block)
        return tail
