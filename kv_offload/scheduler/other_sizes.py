"""What host memory would bring at half, twice and four times its size: an estimate while it serves.

A sample of the blocks goes through caches in miniature (`cache.miniature`) with the policy that
runs. What the estimate at another size adds to what host memory really brings is the difference
between two miniatures, of that size and of its own. So what is common to both cancels out: chance,
such as whether a block is in the sample that every prompt begins with, and what a miniature does
not know, such as blocks that could not be stored in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kv_offload.cache.miniature import Miniature, sample_blocks
from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.config import OffloadConfig
from kv_offload.engine import Request
from kv_offload.metrics import OTHER_SIZES
from kv_offload.scheduler.statistics import Statistics

MINIATURE_SLOTS = 4096
"""Slots of the largest miniature, at most. The others have as small a share of their slots.

On the conversation trace of Mooncake estimates were within 0.9 points of a replay at each size;
four times as many slots brought 0.8 and took longer (November 2026)."""


PART_KEYS = 16
"""Sampled keys that one step serves in one miniature, unless many wait. It bounds what a prompt
adds to a step."""

SHARE_OF_WAITING = 8
"""One of so many that wait is served besides, so that a queue does not grow without end."""


class _Turn(NamedTuple):
    """Sampled keys of a request that one miniature serves, and what counts once it has."""

    size: str
    keys: Sequence[SlotKey]
    prompt_tokens: int
    passed: int
    """How many of them lie before what was looked up."""
    hitting: set[str]
    """Of the request: the miniatures that had all keys before these."""
    looked_up_tokens: int
    found_tokens: int


class OtherSizes:
    """Follows requests, and counts the tokens that caches of other sizes would have had.

    Only for models with one cache group that reads all tokens: of others nothing is estimated,
    since a window or a state is as large as many tokens. What requests have of the sample is noted
    when they are admitted and when they end, and served in the steps that follow.
    """

    def __init__(
        self, config: OffloadConfig, prefixes: PrefixMap, num_slots: int, statistics: Statistics
    ) -> None:
        self.with_tier = False
        """Whether hits of a tier count among what is found: then miniatures alone are believed."""
        self._prompt_only = config.store_blocks == "prompt"
        self._statistics = statistics
        largest = max(OTHER_SIZES.values()) * num_slots
        self._rarity_bits = max(
            0, (int(largest) - 1).bit_length() - MINIATURE_SLOTS.bit_length() + 1
        )
        self._miniatures = {
            name: Miniature(
                config.eviction_policy,
                max(1, round(factor * num_slots) >> self._rarity_bits),
                store_after_uses=config.store_after_uses,
            )
            for name, factor in OTHER_SIZES.items()
            if prefixes.serves_whole_requests and len(prefixes.groups) == 1
        }
        self._block_tokens = prefixes.groups[0].block_tokens
        self._step = prefixes.block_hashes[0]
        # That of the size as it is goes first: until the others have followed they are taken for
        # smaller, not for larger than they are.
        self._sizes = sorted(self._miniatures, key=lambda name: name != "same")
        self._waiting: deque[_Turn] = deque()
        self._has_noted = False
        """Whether a request began or ended in this step, which takes long enough without a turn."""
        self._sampled = dict.fromkeys(OTHER_SIZES, 0)
        """Tokens that each miniature had, as many as its hits stand for."""
        self._looked_up = self._found = 0
        self._told = dict.fromkeys(OTHER_SIZES, 0)

    def admitted(self, request: Request, start_tokens: int, found_tokens: int) -> None:
        """Hear of an admitted request: what lay behind `start_tokens` was looked up.

        `found_tokens` of it were in host memory, loaded or not.
        """
        if not self._miniatures:
            return
        first = start_tokens // self._block_tokens
        end = len(request.block_hashes) // self._step
        self._note(request, 0, end, first, request.num_tokens - start_tokens, found_tokens)

    def ended(self, request: Request, end_tokens: int) -> None:
        """Hear that a request ends of which `end_tokens` are computed: its answer is stored."""
        first = request.num_prompt_tokens // self._block_tokens
        last = end_tokens // self._block_tokens
        if self._miniatures and not self._prompt_only and first < last:
            self._note(request, first, last, last, 0, 0)

    def _note(
        self, request: Request, begin: int, end: int, first: int, looked_up: int, found: int
    ) -> None:
        """Have the sample of blocks `begin` to `end` served; hits from block `first` on count.

        Tokens that were looked up and found count with the last turn: an estimate compares what all
        sizes had of the same requests.
        """
        self._has_noted = True
        hashes, step = request.block_hashes, self._step
        places = sample_blocks(hashes, self._rarity_bits, step)
        places = [place for place in places if begin <= place < end][:MINIATURE_SLOTS]
        hitting = {*self._miniatures}
        last = max(0, len(places) - 1) // PART_KEYS * PART_KEYS
        for at in range(0, last + 1, PART_KEYS):
            part = places[at : at + PART_KEYS]
            keys = [hashes[(place + 1) * step - 1] for place in part]
            passed = sum(place < first for place in part)
            for size in self._sizes if keys else self._sizes[-1:]:
                ends = at == last and size == self._sizes[-1]
                tokens = (looked_up, found) if ends else (0, 0)
                turn = _Turn(size, keys, request.num_prompt_tokens, passed, hitting, *tokens)
                self._waiting.append(turn)

    def work(self, *, idle: bool) -> None:
        """Serve a part of what was noted, or all of it if the engine is idle, and count."""
        waiting = self._waiting
        turns = len(waiting) // SHARE_OF_WAITING
        if waiting and not self._has_noted:
            turns += 1
        self._has_noted = False
        for _ in range(len(waiting) if idle else turns):
            self._serve(waiting.popleft())
        found = 0 if self.with_tier else self._found - self._sampled.get("same", 0)
        for name, sampled in self._sampled.items():
            # What falls for a while is made up for later: a counter only grows.
            estimate = min(found + sampled, self._looked_up)
            if estimate > self._told[name]:
                self._statistics.count(f"hit_tokens_at_{name}", estimate - self._told[name])
                self._told[name] = estimate

    def _serve(self, turn: _Turn) -> None:
        self._looked_up += turn.looked_up_tokens
        self._found += turn.found_tokens
        if not turn.keys:
            return
        miniature = self._miniatures[turn.size]
        hits = miniature.serve(turn.keys, turn.passed, prompt_tokens=turn.prompt_tokens)
        if turn.size in turn.hitting:
            self._sampled[turn.size] += (hits * self._block_tokens) << self._rarity_bits
            if turn.passed + hits < len(turn.keys):
                turn.hitting.remove(turn.size)

    def reset(self) -> None:
        """Hear that host memory was emptied."""
        self._waiting.clear()
        for miniature in self._miniatures.values():
            miniature.reset()
