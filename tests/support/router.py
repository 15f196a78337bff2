"""A router that follows vLLM's KV events, as llm-d's and Dynamo's do, and checks them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash

Block = tuple[int, Any]
"""Cache group and hash, as in vLLM's events."""

PREFIX_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
"""Kinds of layers whose blocks llm-d indexes."""


class LlmdIndex:
    """The blocks that llm-d's router finds by tokens, as `pkg/kvevents/pool.go` reads events.

    A block without tokens counts if some engine has announced its hash with tokens. A block whose
    parent was never announced is dropped.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, set[Block]] = {}
        """Blocks by medium, in lower case."""
        self._kinds: dict[int, str] = {}
        self._with_tokens: set[Block] = set()

    def hear(self, event: Any) -> None:
        """Apply an event."""
        if type(event).__name__ == "AllBlocksCleared":
            self.blocks.clear()
            return
        group = event.group_idx
        blocks = {(group, h) for h in event.block_hashes}
        found = self.blocks.setdefault((event.medium or "gpu").lower(), set())
        if type(event).__name__ == "BlockRemoved":
            if self._kinds.get(group) in PREFIX_KINDS:
                found -= blocks
            return
        kind = self._kinds[group] = event.kv_cache_spec_kind or self._kinds.get(group, "")
        parent = event.parent_block_hash
        if kind not in PREFIX_KINDS:
            return
        if parent is not None and (group, parent) not in self._with_tokens:
            return
        if event.token_ids:
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            self._with_tokens |= blocks
        found |= blocks & self._with_tokens


class DynamoIndex:
    """The blocks of each tier that Dynamo's router indexes, as `lib/kv-router` reads events.

    It drops blocks that are not LOCAL or on an unknown medium, and does not index blocks without
    tokens or of another size.
    """

    TIERS: ClassVar = {"GPU": "device", "CPU": "host_pinned", "STORAGE": "disk"}

    def __init__(self, block_tokens: int) -> None:
        self.blocks: dict[str, set[Block]] = {}
        self.dropped = 0
        self._block_tokens = block_tokens

    def hear(self, event: Any) -> None:
        """Apply an event."""
        if type(event).__name__ == "AllBlocksCleared":
            self.blocks.clear()
            return
        tier = self.TIERS.get(event.medium or "GPU")
        if event.locality not in (None, "LOCAL") or tier is None:
            self.dropped += 1
            return
        blocks = {(event.group_idx, h) for h in event.block_hashes}
        found = self.blocks.setdefault(tier, set())
        if type(event).__name__ == "BlockRemoved":
            found -= blocks
        elif event.token_ids and event.block_size == self._block_tokens:
            found |= blocks


class Router:
    """Knows which blocks are in host memory and on the disk, from events alone.

    With `clears_all`, `AllBlocksCleared` drops all of the engine's blocks, as in llm-d's router;
    otherwise only those on the GPU.
    """

    def __init__(self, hash_block_tokens: int, *, clears_all: bool) -> None:
        self.clears_all = clears_all
        self.in_memory: set[Block] = set()
        self.on_disk: set[Block] = set()
        self.without_tokens: set[Block] = set()
        """Blocks in memory or on the disk that were announced by hash alone."""
        self.heard = 0
        """The number of blocks of host memory announced or removed."""
        self._hash_block_tokens = hash_block_tokens
        self._hash = get_hash_fn_by_name("sha256")
        self._whole: dict[Any, bytes | None] = {None: None}  # by the published hash

    def hear(self, events: Iterable[Any], readable: Iterable[Block] | None = None) -> None:
        """Apply a batch that was published while host memory had `readable`.

        When a block is announced, the blocks of its prefix that are in `readable` must be known.
        """
        present = set(readable or ())
        for event in events:
            name = type(event).__name__
            if name == "AllBlocksCleared":
                if self.clears_all:
                    self.in_memory.clear()
                    self.on_disk.clear()
            elif event.medium == "GPU":
                continue
            elif name == "BlockStored":
                self._store(event, present if event.medium == "CPU" else set())
            else:
                assert name == "BlockRemoved"
                self._place(event).difference_update(
                    (event.group_idx, h) for h in event.block_hashes
                )
                self.heard += len(event.block_hashes)

    def _place(self, event: Any) -> set[Block]:
        assert event.locality == "LOCAL"
        return {"CPU": self.in_memory, "STORAGE": self.on_disk}[event.medium]

    def _store(self, event: Any, present: set[Block]) -> None:
        group, hashes = event.group_idx, event.block_hashes
        blocks = {(group, h) for h in hashes}
        assert event.kv_cache_spec_kind
        self._place(event).update(blocks)
        self.heard += len(hashes)
        if not event.token_ids:
            assert event.block_size == 0, "vLLM's own events without tokens have 0"
            assert event.parent_block_hash is None
            self.without_tokens |= blocks
            return
        self.without_tokens -= blocks
        assert len(event.token_ids) == len(hashes) * event.block_size
        assert len(event.extra_keys) == len(hashes) > 0
        parent = event.parent_block_hash
        if (group, parent) in present:
            assert (group, parent) in self.in_memory, "a block is known before its parent"
        if parent in self._whole and not any(event.extra_keys):
            assert hashes == self._chain(self._whole[parent], event.token_ids, event.block_size)

    def _chain(self, parent: bytes | None, tokens: Sequence[int], block_tokens: int) -> list[Any]:
        """Return the hashes of blocks with these tokens, as the engine computes them."""
        size = self._hash_block_tokens
        hashes = []
        for end in range(size, len(tokens) + 1, size):
            parent = hash_block_tokens(self._hash, parent, tuple(tokens[end - size : end]), None)
            if not end % block_tokens:
                hashes.append(maybe_convert_block_hash(parent))
                self._whole[hashes[-1]] = parent
        return hashes
