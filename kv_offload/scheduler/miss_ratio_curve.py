"""Estimates hits of host memory at half, twice and four times its size, while it serves.

A sample of the blocks goes through caches in miniature (`cache.mini_sim`) with the policy that
runs. What the estimate at another size adds to what host memory really brings is the difference
between two miniatures, of that size and of its own. So what is common to both cancels out: chance,
such as whether a block is in the sample that every prompt begins with, and what a miniature does
not know, such as blocks that could not be stored in time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_offload.cache.mini_sim import MiniSim, SampledRequest, sample_blocks
from kv_offload.cache.prefix import PrefixMap
from kv_offload.config import OffloadConfig
from kv_offload.engine import Request
from kv_offload.metrics import OTHER_SIZES
from kv_offload.scheduler.statistics import Statistics

MINIATURE_SLOTS = 2048
"""Slots of the largest miniature, at most. The others have as small a share of their slots.

On the conversation trace of Mooncake, with 1,000 to 40,000 slots of host memory, estimates of eight
tries were within 1.0 points of a replay at each size. With twice as many slots here they were no
better, with half as many within 1.9 points (November 2026)."""

PART_KEYS, MAX_NOTED_REQUESTS = 16, 64
"""Sampled keys, and requests, of which one is enough for a turn of each miniature. A turn of `lru`
takes 26 us for 16 keys and 23 for 8, with which estimates were no better (November 2026)."""

PARTS_OF_REQUEST, MOST_PART_KEYS = 16, 64
"""Into how many parts a prompt of many sampled keys is cut, unless a part has so many. A prompt of
780 turns made one of its steps 11 ms longer (November 2026)."""

SHARE_OF_WAITING = 32
"""One of so many turns that wait is served besides, so that a queue does not grow without end."""

IDLE_TURNS = 32
"""Turns that a step of an idle engine serves, at most: its last token is waiting, or a request that
has just come. They take 2 to 5 ms."""


class _Part(NamedTuple):
    """Sampled keys of a request."""

    sample: SampledRequest
    hitting: set[str]
    """The miniatures that had all of the request's keys before these."""


@dataclass(slots=True)
class _Notes:
    """The work of all miniatures, each in a turn; it counts once the last one has done it."""

    parts: list[_Part] = field(default_factory=list)
    keys: int = 0
    requests: int = 0
    looked_up_tokens: int = 0
    found_tokens: int = 0


class MissRatioCurve:
    """Follows requests, and counts the tokens that caches of other sizes would have had.

    Only for models with one cache group that reads all tokens: of others nothing is estimated,
    since a window or a state is as large as many tokens. What requests have of the sample is noted
    when they are admitted and when they end, and served in the steps that follow.
    """

    def __init__(
        self,
        config: OffloadConfig,
        prefixes: PrefixMap,
        num_slots: int,
        statistics: Statistics,
        *,
        with_tier: bool = False,
    ) -> None:
        # Hits of a tier count among what is found: then only the miniatures are believed.
        self._with_tier = with_tier
        self._prompt_only = config.store_blocks == "prompt"
        self._statistics = statistics
        largest = max(OTHER_SIZES.values()) * num_slots
        self._rarity_bits = max(
            0, (int(largest) - 1).bit_length() - MINIATURE_SLOTS.bit_length() + 1
        )
        self._miniatures = {
            name: MiniSim(
                config.eviction_policy,
                max(1, round(factor * num_slots) >> self._rarity_bits),
            )
            for name, factor in OTHER_SIZES.items()
        }
        self._block_tokens = prefixes.groups[0].block_tokens
        self._step = prefixes.block_hashes[0]
        # That of the size as it is goes first: until the others have followed they are taken for
        # smaller, not for larger than they are.
        self._sizes = sorted(self._miniatures, key=lambda name: name != "same")
        self._notes = _Notes()
        self._turns: deque[tuple[str, _Notes | None]] = deque()
        """Which miniature serves what; None empties it."""
        self._has_noted = False
        """True if a request began or ended in this step, which takes long enough without a turn."""
        self._sampled = dict.fromkeys(OTHER_SIZES, 0)
        """Tokens that each miniature had, as many as its hits stand for."""
        self._looked_up = self._found = 0
        self._told = dict.fromkeys(OTHER_SIZES, 0)

    @staticmethod
    def can_estimate(prefixes: PrefixMap) -> bool:
        """Return whether hits of a model can be estimated."""
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
        """Have the sample of blocks `begin` to `end` served; hits from block `first` on count."""
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
        # With the last of its keys: an estimate compares what all sizes had of the same requests.
        notes = self._notes
        notes.requests += 1
        notes.looked_up_tokens += looked_up
        notes.found_tokens += found
        if notes.keys >= PART_KEYS or notes.requests >= MAX_NOTED_REQUESTS:
            self._give_turns()

    def _give_turns(self) -> None:
        """Have each miniature serve what was noted."""
        self._turns += [(size, self._notes) for size in self._sizes]
        self._notes = _Notes()

    @property
    def has_turns(self) -> bool:
        """True if something waits that `work` serves."""
        return bool(self._turns)

    def work(self, *, idle: bool) -> None:
        """Serve a part of what was noted, more of it if the engine is idle, and count."""
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
            self._tell()

    def _tell(self) -> None:
        """Count what the estimates have grown by."""
        found = 0 if self._with_tier else self._found - self._sampled.get("same", 0)
        for name, sampled in self._sampled.items():
            # A fall is made up for later: a counter only grows.
            estimate = min(found + sampled, self._looked_up)
            if estimate > self._told[name]:
                self._statistics.count(f"hit_tokens_at_{name}", estimate - self._told[name])
                self._told[name] = estimate

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
        """Empty each miniature as host memory was, after what was noted before."""
        if self._notes.requests:
            self._give_turns()
        if not self._turns or self._turns[-1][1] is not None:  # a trainer may call a thousand times
            self._turns += [(size, None) for size in self._sizes]
