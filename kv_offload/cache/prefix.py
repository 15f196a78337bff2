"""Maps a request's tokens to cache groups and slot keys, and finds the longest hit in host memory.

The key of a slot is the chained hash of its block, followed by the group in all groups except group
0. The hash is vLLM's own, so it covers LoRA adapters, multimodal inputs and cache salts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import Mask, MissingKeyError
from kv_offload.errors import UnsupportedError

SlotKey = bytes
KeyMaker = Callable[[bytes, int], bytes]
"""vLLM's `make_block_hash_with_group_id`, which makes a key of vLLM's own pool."""
Readable = Callable[[Sequence[SlotKey]], Mask]
"""Returns for each key whether host memory can serve it."""

FIRST_LOOKUP_SLOTS, LOOKUP_GROWTH = 8, 4
"""A search first looks up this many slots, since a new prompt misses its first slot; if none is
missing, each further lookup takes this many times as many."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table, and how far back their queries read.

    At most one of the first four is set. If none is, a query reads all tokens before it.

    - `window_tokens`: a query reads its own token and the `window_tokens - 1` tokens before it.
    - `chunk_tokens`: a query reads from the last multiple of `chunk_tokens` (chunked-local
      attention).
    - `holds_state`: a query reads the state after the previous token (Mamba, gated delta nets). A
      block holds the state after its last token; some blocks of a prefix are never made.
    - `is_scratch`: a query reads only data that the request itself has written: keys that are not
      compressed yet, of which there are none where a hit ends, or a window that the engine
      recomputes after a hit. Its blocks are never stored or loaded.
    - `sees_next_token`: the KV of a token also depends on the next token, because a draft head is
      fed both. The KV of a block's last token then depends on a token that only the hash of the
      next block covers. So a hit needs a proof: the block after its end is readable too.
    - `retention_tokens`: for a window, the engine gives hashes only to the blocks before the end of
      a prompt and before each multiple of this; 0 means the end of a prompt only, None means all
      blocks.
    - `unnamed_tokens`: the engine gives a hash to this many of the last tokens of a step only in a
      later step, because several MTP modules recompute their KV.
    - `state_tokens`: how many tokens are compressed into each entry of a block. If this is more
      than one, the last token of a hit cannot be recomputed on its own.
    """

    group_id: int
    block_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    holds_state: bool = False
    sees_next_token: bool = False
    retention_tokens: int | None = None
    is_scratch: bool = False
    state_tokens: int = 1
    unnamed_tokens: int = 0

    @property
    def reads_all(self) -> bool:
        """True if a query reads every token before it."""
        partial = self.window_tokens is not None or self.chunk_tokens is not None
        return not (partial or self.holds_state or self.is_scratch)

    def held_blocks(self, num_blocks: int) -> int:
        """Return the maximum number of a table's blocks that a running request is sure to hold.

        The engine frees blocks that a window has left, and keeps two blocks of states.
        """
        if self.reads_all:
            return num_blocks
        tokens = self.window_tokens or self.chunk_tokens or self.block_tokens
        return min(num_blocks, -(-tokens // self.block_tokens) + 1)

    def first_needed_token(self, end_tokens: int) -> int:
        """Return the first token whose KV a query at `end_tokens` reads; `end_tokens` if none."""
        if self.holds_state:
            return max(0, end_tokens - 1)
        if self.chunk_tokens is not None:
            return end_tokens - end_tokens % self.chunk_tokens
        if self.window_tokens is not None:
            return max(0, end_tokens - self.window_tokens + 1)
        return 0


def _group_suffix(make_key: KeyMaker, group_id: int) -> bytes:
    suffix, made = make_key(b"", group_id), make_key(b"hash", group_id)
    if made != b"hash" + suffix:
        raise UnsupportedError(
            f"this vLLM builds its block keys in an unknown way ({made!r} of b'hash', "
            f"{suffix!r} of nothing): install one that README.md names"
        )
    return suffix


class PrefixMap:
    """Maps tokens of a request to slots and their keys, and finds the longest prefix to load."""

    def __init__(
        self, groups: Sequence[CacheGroup], hash_block_tokens: int, make_key: KeyMaker
    ) -> None:
        self.groups = tuple(groups)
        self._hash_block_tokens = hash_block_tokens
        suffixes = [_group_suffix(make_key, group.group_id) for group in self.groups]
        # Group 0 has none: Python has already hashed the request's own bytes objects, which saves
        # much time. They are shorter than keys with a suffix, so the two kinds never collide.
        ids = [group.group_id for group in self.groups]
        self._suffix = {i: suffix if i else b"" for i, suffix in zip(ids, suffixes, strict=True)}
        self.pool_key_suffix = tuple(
            b"" if i else suffix for i, suffix in zip(ids, suffixes, strict=True)
        )
        """By group: the suffix that turns a slot's key into the engine's key of the same block."""
        self.block_hashes = tuple(group.block_tokens // hash_block_tokens for group in self.groups)
        """By group: the number of a request's hashes that one block spans."""
        self.alignment_tokens = math.lcm(*(group.block_tokens for group in self.groups))
        """Hits end at multiples of this, where every group has a whole block."""
        self.stored_groups = tuple(group for group in self.groups if not group.is_scratch)
        self.unnamed_tokens = max(group.unnamed_tokens for group in self.groups)
        self._search_order = sorted(self.stored_groups, key=lambda group: not group.reads_all)
        self._has_full = self._search_order[0].reads_all
        self.reads_all = self._search_order[-1].reads_all
        """True if every stored group reads all tokens."""
        self._chain_suffix = self._suffix[self._search_order[0].group_id]
        self.serves_whole_requests = all(
            group.reads_all and group.state_tokens == 1 and not group.sees_next_token
            for group in self.groups
        )
        """True if a hit may cover all tokens of a request: the engine recomputes the last one.

        For that token, a window could begin too late, a state would already include it, scratch
        would lack the tokens that it is compressed with, and a draft head's KV would lack a proof.
        """
        may_end_inside = len({group.block_tokens for group in self.groups}) == 1 and all(
            group.reads_all or (group.holds_state and not group.sees_next_token)
            for group in self.groups
        )
        has_tails = may_end_inside and not self.reads_all
        is_finer = hash_block_tokens < self.alignment_tokens
        self.tail_tokens = hash_block_tokens if has_tails and is_finer else 0
        """Hits of states may also end at multiples of this, inside blocks; 0 if they cannot."""
        has_proofs = any(group.sees_next_token for group in self.groups)
        self.proof_tokens = self.tail_tokens * has_proofs
        """Tokens after an end inside a block that the key of a draft head's block also covers."""

    def align(self, tokens: int) -> int:
        """Return the largest multiple of `alignment_tokens` that is at most `tokens`."""
        return tokens - tokens % self.alignment_tokens

    def slot_keys(
        self, hashes: Sequence[bytes], group: CacheGroup, first: int, last: int
    ) -> list[SlotKey]:
        """Return the keys of slots `first` to `last` (exclusive) that have hashes."""
        if group.is_scratch:
            return []
        # The last hash that each block spans.
        step = group.block_tokens // self._hash_block_tokens
        ends = hashes[(first + 1) * step - 1 : last * step : step]
        suffix = self._suffix[group.group_id]
        return [block_hash + suffix for block_hash in ends] if suffix else list(ends)

    def tail_keys(
        self, hashes: Sequence[bytes], group: CacheGroup, end_tokens: int
    ) -> list[SlotKey]:
        """Return the key of the block inside which a prefix ends; none if it ends with a block.

        It is the hash at the end of the prefix. If KV depends on the next token, it is the next
        hash, which is also the proof. Raises `MissingKeyError` if no block can end there.
        """
        if not end_tokens % group.block_tokens or group.is_scratch:
            return []
        step = self.tail_tokens
        if not step or end_tokens % step:
            raise MissingKeyError(
                f"no block ends at token {end_tokens}: blocks of cache group {group.group_id} have "
                f"{group.block_tokens} tokens"
            )
        block_hash = hashes[end_tokens // step - 1 + group.sees_next_token]
        return [block_hash + self._suffix[group.group_id]]

    def key_before(self, hashes: Sequence[bytes], position: int, slot: int) -> SlotKey | None:
        """Return the key of the slot without which this slot is useless; None if there is none."""
        group = self.groups[position]
        if not slot or not group.reads_all:
            return None
        return hashes[slot * self.block_hashes[position] - 1] + self._suffix[group.group_id]

    def position_of(self, key: SlotKey) -> int:
        """Return the position in `groups` of a key's group."""
        for position, group in enumerate(self.groups):
            if group.group_id and key.endswith(self._suffix[group.group_id]):
                return position
        return 0

    def hash_of(self, group: CacheGroup, key: SlotKey) -> bytes:
        """Return the engine's hash of the block that a slot key of this group names."""
        return key.removesuffix(self._suffix[group.group_id])

    def needed_slots(self, group: CacheGroup, start_tokens: int, end_tokens: int) -> range:
        """Return the slots that a group must load to extend a prefix to `end_tokens`."""
        if group.is_scratch:
            return range(0)
        first = max(start_tokens, group.first_needed_token(end_tokens))
        return range(first // group.block_tokens, end_tokens // group.block_tokens)

    def count_named(self, group: CacheGroup, slots: Sequence[int], prompt_tokens: int) -> int:
        """Return how many of a request's computed slots get a hash from the engine.

        States, and windows with `retention_tokens`, get one only if a hit at certain tokens reads
        them. For states these tokens are unknown here, so none counts.
        """
        if group.holds_state or group.is_scratch:
            return 0
        if group.retention_tokens is None:
            return len(slots)
        # The last token of a prompt is always computed, so the reused part ends before it.
        at_end = self.needed_slots(group, 0, self.align(prompt_tokens - 1))
        return sum(slot in at_end or self._is_retained(group, slot) for slot in slots)

    def _is_retained(self, group: CacheGroup, slot: int) -> bool:
        if not group.retention_tokens:
            return False
        end = math.ceil((slot + 1) * group.block_tokens / group.retention_tokens)
        return slot in self.needed_slots(group, 0, end * group.retention_tokens)

    def _needed(self, start_tokens: int, end_tokens: int) -> Iterator[tuple[CacheGroup, range]]:
        """Yield by group the slots of `needed_keys`, with the one inside which the prefix ends."""
        for group in self.stored_groups:
            slots = self.needed_slots(group, start_tokens, end_tokens)
            has_tail = end_tokens > start_tokens and end_tokens % group.block_tokens > 0
            yield group, range(slots.start, slots.stop + has_tail)

    def count_slots(self, start_tokens: int, end_tokens: int) -> int:
        """Return the number of slots that extend a prefix from `start_tokens` to `end_tokens`."""
        return sum(len(slots) for _, slots in self._needed(start_tokens, end_tokens))

    def needed_tokens(self, start_tokens: int, end_tokens: int) -> NDArray[np.int64]:
        """Return the first token of each slot of `needed_keys`, shape `(keys,)`."""
        needed = self._needed(start_tokens, end_tokens)
        return np.concatenate(
            [np.arange(slots.start, slots.stop) * group.block_tokens for group, slots in needed]
        )

    def needed_keys(
        self, hashes: Sequence[bytes], start_tokens: int, end_tokens: int
    ) -> list[SlotKey]:
        """Return the keys of the slots that extend a prefix from start to end, group by group."""
        keys: list[SlotKey] = []
        for group, slots in self._needed(start_tokens, end_tokens):
            whole = end_tokens // group.block_tokens
            keys += self.slot_keys(hashes, group, slots.start, whole)
            if slots.stop > whole:
                keys += self.tail_keys(hashes, group, end_tokens)
        return keys

    def chain_keys(
        self, hashes: Sequence[bytes], start_tokens: int, end_tokens: int
    ) -> list[SlotKey]:
        """Return the slot keys of a group that reads all tokens, if any; each names a prefix."""
        group = self._search_order[0]
        if not self._has_full:
            return []
        first, last = start_tokens // group.block_tokens, end_tokens // group.block_tokens
        return self.slot_keys(hashes, group, first, last)

    def chain_key(self, hashes: Sequence[bytes], end_tokens: int) -> SlotKey:
        """Return the one of `chain_keys` that ends at `end_tokens`, where there is a hash."""
        return hashes[end_tokens // self._hash_block_tokens - 1] + self._chain_suffix

    def end_within(
        self, known: Mapping[SlotKey, object], hashes: Sequence[bytes], start: int, limit: int
    ) -> int:
        """Return the last aligned token, at most `limit`, up to which a prefix is in `known`.

        Takes O(log tokens). `known` holds `chain_keys` without gaps from `start` or earlier.
        """
        step = self.alignment_tokens
        low, high = start // step, self.hashed_end(hashes, limit) // step
        if not known:
            return start
        while low < high:
            middle = (low + high + 1) // 2
            if self.chain_key(hashes, middle * step) in known:
                low = middle
            else:
                high = middle - 1
        return low * step

    def hashed_end(self, hashes: Sequence[bytes], limit_tokens: int) -> int:
        """Return the last aligned token, at most `limit_tokens`, up to which there are hashes."""
        return self.align(self.hashed_tokens(hashes, limit_tokens))

    def hashed_tokens(self, hashes: Sequence[bytes], limit_tokens: int) -> int:
        """Return the last token, at most `limit_tokens`, up to which there are hashes."""
        return min(limit_tokens, len(hashes) * self._hash_block_tokens)

    def longest_hits(
        self,
        hashes: Sequence[bytes],
        readable: Readable,
        start_tokens: int,
        limit_tokens: int,
        known_tokens: int = 0,
    ) -> tuple[int, int]:
        """Return how far a prefix of `start_tokens` can be extended, or `start_tokens`.

        Also returns how far the groups that read all tokens can extend it, in whole blocks. The two
        are equal unless there are groups of both kinds. Groups that read all tokens are not looked
        up before `known_tokens`, because they are known to have everything there.

        Every group must have the blocks that a query at the end still reads. If KV depends on the
        next token, the slot after the end must be readable too; it may be beyond `limit_tokens`.

        A group that falls short lowers the end for all groups, so the search repeats over all
        groups until the end is stable. It begins with groups that read all tokens: for them a few
        lookups show that nothing of a prompt is stored, while other groups look for any block.
        """
        end = self.hashed_end(hashes, limit_tokens)
        previous = None
        full_end = None if self._has_full else 0
        while end > start_tokens and end != previous:
            previous = end
            for group in self._search_order:
                if full_end is None and not group.reads_all:
                    full_end = end
                start = max(start_tokens, known_tokens) if group.reads_all else start_tokens
                end = self._covered_end(group, hashes, readable, start, end)
                if end <= start_tokens:
                    break
            if len(self._search_order) == 1:
                break  # the only group covers this end
        end = max(end, start_tokens)
        full_end = max(end, full_end or 0)
        if self.tail_tokens:
            end = self._tail_end(hashes, readable, start_tokens, end, full_end, limit_tokens)
        return end, full_end

    def _tail_end(
        self,
        hashes: Sequence[bytes],
        readable: Readable,
        start_tokens: int,
        end_tokens: int,
        full_tokens: int,
        limit_tokens: int,
    ) -> int:
        """Return the largest end inside a block beyond `end_tokens`, or `end_tokens`.

        `full_tokens` is how far the groups that read all tokens have whole blocks. Looks at the
        block after that, and at the one before: an earlier end saves at most a block's tokens.
        """
        step, block = self.tail_tokens, self.alignment_tokens
        # A block that lacks its proof is not in `full_tokens`; a tail has its proof.
        most = full_tokens + (2 if self.proof_tokens else 1) * block - 1
        hashed = self.hashed_tokens(hashes, limit_tokens + self.proof_tokens)
        last = min(hashed - self.proof_tokens, most)
        first = max(end_tokens, full_tokens - block) + step
        ends = [end for end in range(last - last % step, first - 1, -step) if end % block]
        group = next(group for group in self.stored_groups if group.holds_state)
        found = readable([key for end in ends for key in self.tail_keys(hashes, group, end)])
        for end in compress(ends, found.tolist()):
            if readable(self.needed_keys(hashes, start_tokens, end)).all():
                return end
        return end_tokens

    def _covered_end(
        self,
        group: CacheGroup,
        hashes: Sequence[bytes],
        readable: Readable,
        start_tokens: int,
        end_tokens: int,
    ) -> int:
        """Return the largest aligned end, at most `end_tokens`, that this group can serve."""
        # The proof is the slot after the end, so a missing slot moves the end back by one more.
        ahead = int(group.sees_next_token)
        if group.reads_all:
            first = start_tokens // group.block_tokens
            last = end_tokens // group.block_tokens + ahead
            count = FIRST_LOOKUP_SLOTS
            while first < last:
                slots = range(first, min(first + count, last))
                present = self._present(group, hashes, readable, slots)
                if not present.all():
                    return self.align((first + int(present.argmin()) - ahead) * group.block_tokens)
                first, count = slots.stop, count * LOOKUP_GROWTH
            return end_tokens
        # Search backwards from the end: slots from `known` on have been looked up, each once.
        # `found` has one byte per slot, 0 if it is missing.
        tokens, end, count = group.block_tokens, end_tokens, FIRST_LOOKUP_SLOTS
        found, known = b"", end_tokens // tokens + ahead
        while end > start_tokens:
            slots = self.needed_slots(group, start_tokens, end)
            if slots.start < known:
                first = max(start_tokens // tokens, min(slots.start, known - count))
                more = self._present(group, hashes, readable, range(first, known))
                found, known, count = more.tobytes() + found, first, count * LOOKUP_GROWTH
            missing = found.rfind(0, slots.start - known, slots.stop + ahead - known)
            if missing < 0:
                return end
            # The end moves to before the missing slot, starting with the last missing one.
            end = self.align((known + missing - ahead) * tokens)
        return end

    def _present(
        self, group: CacheGroup, hashes: Sequence[bytes], readable: Readable, slots: range
    ) -> Mask:
        """Return for each slot whether it is readable; a slot without a hash is not."""
        keys = self.slot_keys(hashes, group, slots.start, slots.stop)
        present = readable(keys)
        return np.append(present, np.zeros(len(slots) - len(keys), bool))
