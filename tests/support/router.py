"""A router that follows vLLM's KV events, as llm-d's and Dynamo's do, and checks what it hears."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash

Block = tuple[int, Any]
"""Cache group and hash, as vLLM publishes it."""


class Router:
    """Knows which blocks are in host memory, from events alone.

    With `clears_all` it takes `AllBlocksCleared` for all that the engine has, as llm-d's does; else
    for what is on the GPU.
    """

    def __init__(self, hash_block_tokens: int, *, clears_all: bool) -> None:
        self.clears_all = clears_all
        self.in_memory: set[Block] = set()
        self.heard = 0
        """Blocks of host memory that became known or were removed."""
        self._hash_block_tokens = hash_block_tokens
        self._hash = get_hash_fn_by_name("sha256")
        self._whole: dict[Any, bytes | None] = {None: None}  # by what is published of it

    def hear(self, events: Iterable[Any], readable: Iterable[Block] | None = None) -> None:
        """Take in a batch, which was made while host memory had `readable`.

        What of this comes before a block in its prefix must be known before it.
        """
        present = set(readable or ())
        for event in events:
            name = type(event).__name__
            if name == "AllBlocksCleared":
                if self.clears_all:
                    self.in_memory.clear()
            elif event.medium != "CPU":
                assert event.medium == "GPU"
            elif name == "BlockStored":
                self._store(event, present)
            else:
                assert name == "BlockRemoved"
                self.in_memory -= {(event.group_idx, h) for h in event.block_hashes}
                self.heard += len(event.block_hashes)

    def _store(self, event: Any, present: set[Block]) -> None:
        group, hashes = event.group_idx, event.block_hashes
        assert event.locality == "LOCAL"
        assert event.kv_cache_spec_kind
        assert len(event.extra_keys) == len(hashes) > 0
        parent = event.parent_block_hash
        if (group, parent) in present:
            assert (group, parent) in self.in_memory, "a block is known before its parent"
        if parent in self._whole and not any(event.extra_keys):
            assert hashes == self._chain(self._whole[parent], event.token_ids, event.block_size)
        self.in_memory |= {(group, h) for h in hashes}
        self.heard += len(hashes)

    def _chain(self, parent: bytes | None, tokens: Sequence[int], block_tokens: int) -> list[Any]:
        """Return the hashes of blocks with these tokens, as the engine makes them."""
        size = self._hash_block_tokens
        hashes = []
        for end in range(size, len(tokens) + 1, size):
            parent = hash_block_tokens(self._hash, parent, tuple(tokens[end - size : end]), None)
            if not end % block_tokens:
                hashes.append(maybe_convert_block_hash(parent))
                self._whole[hashes[-1]] = parent
        return hashes
