"""Estimates hits of host memory at half, twice and four times its size, while it serves.

A sample of the blocks goes through miniature caches (`mini_sim`) with the configured policy.
The estimate for another size is the real hits of host memory plus the difference between two
miniatures, of that size and of the real one. Errors that both share thus cancel out: chance, such
as whether the sample has the block that every prompt begins with, and blocks that could not be
stored in time, which a miniature does not see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_offload.cache.prefix import PrefixMap
from kv_offload.config import OffloadConfig
from kv_offload.engine import Request
from kv_offload.metrics import OTHER_SIZES
from kv_offload.simulation.mini_sim import MiniSim, SampledRequest, sample_blocks

MINIATURE_SLOTS = 2048
"""Maximum slots of the largest miniature. The others are scaled down by the same factor.

On the conversation trace of Mooncake, with 1,000 to 40,000 slots of host memory, estimates of eight
tries were within 1.0 points of a replay at each size. With twice as many slots here they were no
better, with half as many within 1.9 points (November 2026)."""

PART_KEYS, MAX_NOTED_REQUESTS = 16, 64
"""This many sampled keys, or this many requests, make a turn of each miniature. A turn of `lru`
takes 26 us for 16 keys and 23 us for 8; 8 gave no better estimates (November 2026)."""

PARTS_OF_REQUEST, MOST_PART_KEYS = 16, 64
"""A prompt with many sampled keys is cut into this many parts, or into more, so that none has more
than `MOST_PART_KEYS` keys. One of 780 turns made a step 11 ms longer (November 2026)."""

SHARE_OF_WAITING = 32
"""Also serve 1 in 32 of the queued turns, so that the queue does not grow without end."""

IDLE_TURNS = 32
"""Maximum turns in a step of an idle engine: its last token, or a new request, waits for them. They
take 2 to 5 ms."""


class _Part(NamedTuple):
    """Sampled keys of a request, and the miniatures that had all of its keys before these."""

    sample: SampledRequest
    hitting: set[str]


@dataclass(slots=True)
class _Notes:
    """Work that each miniature does in a separate turn; it counts once the last one has done it."""

    parts: list[_Part] = field(default_factory=list)
    keys: int = 0
    requests: int = 0
    looked_up_tokens: int = 0
    found_tokens: int = 0


class MissRatioCurve:
    """Follows requests, and reports to `count` the tokens that caches of other sizes would have.

    Only for models with one cache group that reads all tokens, since a window or a state is as
    large as many tokens. The sampled keys of a request are noted when it is admitted and when it
    ends, and served to the miniatures in later steps.
    """

    def __init__(
        self,
        config: OffloadConfig,
        prefixes: PrefixMap,
        num_slots: int,
        count: Callable[[str, float], None],
        *,
        with_tier: bool = False,
    ) -> None:
        # Real hits include those of a tier, so with one only the miniatures count.
        self._with_tier = with_tier
        self._prompt_only = config.store_blocks == "prompt"
        self._count = count
        largest = max(OTHER_SIZES.values()) * num_slots
        surplus_bits = (int(largest) - 1).bit_length() - MINIATURE_SLOTS.bit_length() + 1
        self._rarity_bits = bits = max(0, surplus_bits)
        self._miniatures = {
            name: MiniSim(config.eviction_policy, max(1, round(factor * num_slots) >> bits))
            for name, factor in OTHER_SIZES.items()
        }
        self._block_tokens = prefixes.groups[0].block_tokens
        self._step = prefixes.block_hashes[0]
        # The real size goes first: until the others have followed they are underestimated, not
        # overestimated.
        self._sizes = sorted(self._miniatures, key=lambda name: name != "same")
        self._notes = _Notes()
        self._turns: deque[tuple[str, _Notes | None]] = deque()
        """Miniatures, each with the notes to serve; None empties it."""
        self._has_noted = False
        """True if a request began or ended in this step, which is long enough without a turn."""
        # Tokens that the hits of each miniature stand for.
        self._sampled = dict.fromkeys(OTHER_SIZES, 0)
        self._looked_up = self._found = 0
        self._reported = dict.fromkeys(OTHER_SIZES, 0)

    @staticmethod
    def can_estimate(prefixes: PrefixMap) -> bool:
        """Return whether a model's hits can be estimated."""
        return prefixes.serves_whole_requests and len(prefixes.groups) == 1

    def admitted(self, request: Request, start_tokens: int, found_tokens: int) -> None:
        """Note an admitted request, whose tokens after `start_tokens` were looked up.

        `found_tokens` of it were in host memory, loaded or not.
        """
        first = start_tokens // self._block_tokens
        end = len(request.block_hashes) // self._step
        self._note(request, 0, end, first, request.num_tokens - start_tokens, found_tokens)

    def ended(self, request: Request, end_tokens: int) -> None:
        """Note the end of a request with `end_tokens` computed: its answer is stored."""
        first = request.num_prompt_tokens // self._block_tokens
        last = end_tokens // self._block_tokens
        if not self._prompt_only and first < last:
            self._note(request, first, last, last, 0, 0)

    def _note(
        self, request: Request, begin: int, end: int, first: int, looked_up: int, found: int
    ) -> None:
        """Note the sampled blocks from `begin` to `end`; hits count from block `first` on."""
        self._has_noted = True
        hashes, step = request.block_hashes, self._step
        places = sample_blocks(hashes, self._rarity_bits, step)
        places = [place for place in places if begin <= place < end][:MINIATURE_SLOTS]
        hitting = {*self._miniatures}
        part_keys = min(MOST_PART_KEYS, max(PART_KEYS, -(-len(places) // PARTS_OF_REQUEST)))
        for at in range(0, len(places), part_keys):
            part = places[at : at + part_keys]
            keys = [hashes[(place + 1) * step - 1] for place in part]
            passed = sum(place < first for place in part)
            if self._notes.keys >= PART_KEYS:
                self._give_turns()
            sample = SampledRequest(keys, passed, request.num_prompt_tokens)
            self._notes.parts.append(_Part(sample, hitting))
            self._notes.keys += len(keys)
        # Counted with its last keys, so that an estimate compares all sizes on the same requests.
        notes = self._notes
        notes.requests += 1
        notes.looked_up_tokens += looked_up
        notes.found_tokens += found
        if notes.keys >= PART_KEYS or notes.requests >= MAX_NOTED_REQUESTS:
            self._give_turns()

    def _give_turns(self) -> None:
        """Queue a turn of each miniature for the notes so far."""
        self._turns += [(size, self._notes) for size in self._sizes]
        self._notes = _Notes()

    @property
    def has_turns(self) -> bool:
        """True if a turn is queued."""
        return bool(self._turns)

    def work(self, *, idle: bool) -> None:
        """Serve some of the queued turns, more of them if the engine is idle, and count hits."""
        if idle and self._notes.requests:
            self._give_turns()
        served = len(self._turns) // SHARE_OF_WAITING
        if self._turns and not self._has_noted:
            served += 1
        self._has_noted = False
        if idle:
            served = min(len(self._turns), IDLE_TURNS)
        for _ in range(served):
            self._serve(*self._turns.popleft())
        if served:
            self._report()

    def _report(self) -> None:
        found = 0 if self._with_tier else self._found - self._sampled.get("same", 0)
        for name, sampled in self._sampled.items():
            # A counter cannot fall: a lower estimate counts once it has grown again.
            estimate = min(found + sampled, self._looked_up)
            if estimate > self._reported[name]:
                self._count(f"hit_tokens_at_{name}", estimate - self._reported[name])
                self._reported[name] = estimate

    def _serve(self, size: str, notes: _Notes | None) -> None:
        if notes is None:
            self._miniatures[size].reset()
            return
        hits = self._miniatures[size].serve([part.sample for part in notes.parts])
        for (sample, hitting), hit in zip(notes.parts, hits, strict=True):
            if size in hitting:
                self._sampled[size] += (hit * self._block_tokens) << self._rarity_bits
                if sample.first + hit < len(sample.keys):
                    hitting.remove(size)
        if size == self._sizes[-1]:
            self._looked_up += notes.looked_up_tokens
            self._found += notes.found_tokens

    def reset(self) -> None:
        """Empty each miniature, as host memory was, after it has served the notes so far."""
        if self._notes.requests:
            self._give_turns()
        if not self._turns or self._turns[-1][1] is not None:  # a trainer may call a thousand times
            self._turns += [(size, None) for size in self._sizes]
