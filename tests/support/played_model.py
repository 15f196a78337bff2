"""A model whose KV names the text: each token's KV is a number for the whole prefix up to it.

So the first forward that reads a block notices if the block was overwritten too early, loaded into
the wrong place, or stored before it was computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.prefix import CacheGroup
from tests.support.configurations import spans_blocks

VOCABULARY = 2

Tokens = list[int]
Draft = Callable[[Tokens], Tokens]


def name_prefix(previous: int, token: int) -> int:
    """Return the KV of a token: a number for the prefix that ends with it."""
    return hash((previous, token)) >> 1


def name_prefixes(tokens: Sequence[int], weights: int, names: list[int] | None = None) -> list[int]:
    """Return the KV of every token, appended to that of the first ones, if it is known."""
    names = [] if names is None else names
    for token in tokens[len(names) :]:
        names.append(name_prefix(names[-1] if names else weights, token))
    return names


def next_token(kv: int) -> int:
    return (kv >> 7) % VOCABULARY


def answer(prompt: Sequence[int], max_tokens: int = 4, weights: int = 0) -> Tokens:
    """Return the model's answer without a cache."""
    kv = name_prefixes(prompt, weights)[-1]
    tokens: Tokens = []
    for _ in range(max_tokens):
        tokens.append(next_token(kv))
        kv = name_prefix(kv, tokens[-1])
    return tokens


def _is_ring(group: CacheGroup) -> bool:
    """Return whether scratch has one block, which holds the last tokens."""
    spans = spans_blocks(group.block_tokens, group.chunk_tokens)
    return group.window_tokens is None and not spans


@dataclasses.dataclass
class _ModelRequest:
    """A model runner's state of a request."""

    tokens: Tokens
    block_ids: list[list[int]]
    prompt_tokens: int
    names: list[int] = dataclasses.field(default_factory=list)
    state_slot: int | None = None
    """The table index of the state with which the next step begins; None before the first step."""
    accepted: int = 1
    """The number of tokens accepted from the last step; its state is this many blocks on, less 1.
    """
    first_computed: int | None = None
    """The first token computed since the request got its blocks; scratch has none before it."""

    def extend_names(self, weights: int) -> list[int]:
        return name_prefixes(self.tokens, weights, self.names)


@dataclasses.dataclass
class Place:
    """Where a request's KV of one group is on one rank."""

    request_id: str
    rank: int
    group: CacheGroup
    words: NDArray[np.int64]
    blocks: NDArray[np.int64]
    first_computed: int = 0
    state_slot: int = 0
    """For states: the index in `blocks` of the state that the step reads."""
    running_slot: int = 0
    """For states: the index of the state after the first token followed only by drafts."""


class PlayedModel:
    """Reads, checks and writes KV on all ranks, and samples; follows scheduler outputs as a runner.

    A query checks all KV that it reads. A mismatch is an `AssertionError`, unless the test has KV
    lost: then the KV and tokens computed from it are wrong, too. With decode context parallelism,
    runs of `interleave` tokens are on the ranks in turn, and a group's `block_tokens` count those
    of all ranks.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        kv: list[list[NDArray[np.int64]]],
        context_ranks: int = 1,
        interleave: int = 1,
    ) -> None:
        self.groups = groups
        self.context_ranks = context_ranks
        self.interleave = interleave
        self.kv = kv
        """By rank and group, of shape `(blocks, block_tokens, words)`."""
        self.weights = 0
        """A different number gives the same tokens different KV."""
        self.may_lose_kv = False
        self.sampled: dict[tuple[str, int], set[int]] = {}
        """Tokens sampled from right KV, by request and position."""
        self.requests: dict[str, _ModelRequest] = {}
        self.find_checkpoint: Callable[[int, int, int], tuple[int, int]] = lambda *_: (0, 0)
        """For a prefill between two tokens and a block size in tokens, returns which state within
        it is kept."""
        self.drafts: dict[str, Tokens] = {}

    def follow(self, output: Any) -> None:
        """Apply the scheduler's output about requests and their blocks."""
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        if output.total_num_scheduled_tokens:  # runner V1 ignores a step without tokens
            for request_id in self.requests.keys() & (output.preempted_req_ids or set()):
                self.requests[request_id].state_slot = None
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            # In a session, runner V1 gets no tokens of an answer, but keeps the place of its state.
            known = None if new.prefill_token_ids else self.requests.get(new.req_id)
            self.requests[new.req_id] = _ModelRequest(
                list(tokens),
                [list(g) for g in new.block_ids],
                len(new.prompt_token_ids),
                state_slot=known and known.state_slot,
            )
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request, new_ids = self.requests[request_id], cached.new_block_ids[index]
            resumed = request_id in cached.resumed_req_ids
            sent = cached.all_token_ids.get(request_id, ())
            if resumed:  # a runner keeps the prompt that it first got
                assert len(sent) == request.prompt_tokens + cached.num_output_tokens[index]
            if resumed or len(sent) > len(request.tokens):
                request.tokens, request.names = list(sent), []
            if resumed:
                request.block_ids = [list(ids) for ids in new_ids]
                request.state_slot = request.first_computed = None
            else:
                for ids, more in zip(request.block_ids, new_ids or (), strict=bool(new_ids)):
                    ids.extend(more)

    def forward(self, output: Any, draft: Draft) -> list[Tokens]:
        """Compute one step; return the sampled tokens by request, in the scheduler's order."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.drafts = {}
        return [
            self.forward_request(request_id, computed[request_id], output, draft)
            for request_id in output.num_scheduled_tokens
        ]

    def forward_request(self, request_id: str, computed: int, output: Any, draft: Draft) -> Tokens:
        """Compute the tokens of one request; return the sampled ones."""
        scheduled = output.num_scheduled_tokens[request_id]
        request = self.requests[request_id]
        known = len(request.tokens)
        # With asynchronous scheduling `computed` also counts drafts that have since been rejected.
        start = min(computed, known - 1)
        names = request.extend_names(self.weights)
        placeholders = output.scheduled_spec_decode_tokens.get(request_id, [])
        drafts = list(placeholders)
        if -1 in drafts:
            drafts = (draft(request.tokens) + [0] * len(drafts))[: len(drafts)]
        end = start + scheduled
        assert end <= known + len(drafts)
        inputs = names[start:end]
        for token in drafts[: max(0, end - known)]:
            inputs.append(name_prefix(inputs[-1], token))
        if request.first_computed is None:
            request.first_computed = start
        places = [
            Place(
                *(request_id, rank, group, words, np.array(request.block_ids[group.group_id])),
                first_computed=request.first_computed,
            )
            for rank, kv in enumerate(self.kv)
            for group, words in zip(self.groups, kv, strict=True)
        ]
        states = [place for place in places if place.group.holds_state]
        for place in states:
            self.begin_states(request, place, start, end)
        right = all([self.check(place, names, start) for place in places])  # noqa: C419
        if not right:
            inputs = [~name for name in inputs]
        for place in places:
            self.write(place, inputs, start, len(drafts))
        if not drafts:
            self.keep_checkpoints(states, inputs, start)
        if end - len(drafts) < known:
            self.end_states(request, states, end, 1)
            return []
        sampled: Tokens = []
        current = names[known - 1]
        for token in [*drafts, None]:
            sampled.append(next_token(current))
            if sampled[-1] != token:
                break
            current = name_prefix(current, token)
        if right:
            for position, token in enumerate(sampled, known):
                self.sampled.setdefault((request_id, position), set()).add(token)
        else:
            sampled = [(sampled[0] + 1) % VOCABULARY]
        self.end_states(request, states, end - len(drafts), len(sampled))
        request.tokens.extend(sampled)
        self.drafts[request_id] = draft(request.tokens)
        return sampled

    def check(self, place: Place, names: list[int], start: int) -> bool:
        """Check the KV that the query at `start` reads."""
        group = place.group
        first = group.first_needed_token(start)
        if group.holds_state:
            positions, row = np.arange(first, start), 0
            blocks = place.blocks[[place.state_slot] * len(positions)]
        elif group.is_scratch:
            # A window is replayed from where it is empty. A ring must have all tokens not yet
            # compressed.
            replayed = place.first_computed if group.window_tokens else 0
            positions = np.arange(max(first, replayed), start)
            blocks, row = self._scratch(place, positions)
        else:
            positions = self._own(place.rank, first, start)
            row = self._rows(group, positions)
            blocks = place.blocks[positions // group.block_tokens]
        found = place.words[blocks, row]
        expected = np.array(names[:start], np.int64)[positions] + group.group_id
        wrong = np.flatnonzero((found != expected[:, None]).any(axis=1))
        assert not len(wrong) or self.may_lose_kv, (
            f"{place.request_id}: rank {place.rank}, group {group.group_id}: wrong KV at "
            f"{positions[wrong]}, read before position {start}"
        )
        return not len(wrong)

    def begin_states(self, request: _ModelRequest, place: Place, start: int, end: int) -> None:
        """Move a request's state to where a step that ends at `end` runs, as vLLM's runners do."""
        tokens = place.group.block_tokens
        before, bias = request.state_slot, request.accepted - 1
        if before is None:
            before, bias = (start - 1) // tokens, 0
        place.state_slot = slot = -(-end // tokens) - 1
        if before in (-1, slot):
            place.state_slot += bias  # it stays where the last accepted token left it
        else:
            place.words[place.blocks[slot]] = place.words[place.blocks[before + bias]]
        place.running_slot = slot

    def keep_checkpoints(self, states: Sequence[Place], inputs: list[int], start: int) -> None:
        """Keep a state within a prefill, like backends that can."""
        for place in states:
            group = place.group
            end = start + len(inputs)
            offset, slot = self.find_checkpoint(start, end, group.block_tokens)
            if offset:
                place.words[place.blocks[slot]] = inputs[offset - 1] + group.group_id

    def end_states(
        self, request: _ModelRequest, states: Sequence[Place], end: int, accepted: int
    ) -> None:
        """Keep the state at the end of a block that accepted drafts have passed.

        `end` is where the step's tokens end, without drafts.
        """
        for place in states:
            tokens, slot = place.group.block_tokens, place.running_slot
            aligned = (end + accepted - 1) // tokens * tokens
            kept = accepted
            if aligned >= end:
                target = aligned // tokens - 1
                place.words[place.blocks[target]] = place.words[place.blocks[slot + aligned - end]]
                kept = 1 if target == slot else accepted
            request.state_slot, request.accepted = slot, kept

    def _own(self, rank: int, start: int, end: int) -> NDArray[np.int64]:
        """Return the positions whose KV a rank has."""
        positions = np.arange(start, end)
        return positions[self.is_own(rank, positions)]

    def is_own(self, rank: int, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        owners = positions // self.interleave % self.context_ranks
        return np.asarray(owners == rank % self.context_ranks)

    def _rows(self, group: CacheGroup, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of a token in its rank's part of a block."""
        runs, inside = np.divmod(positions % group.block_tokens, self.interleave)
        return np.asarray(runs // self.context_ranks * self.interleave + inside)

    def _scratch(self, place: Place, positions: NDArray[np.int64]) -> Any:
        """Return the blocks and rows of these tokens in a request's scratch; a ring has one."""
        tokens = place.group.block_tokens
        slots = np.zeros_like(positions) if _is_ring(place.group) else positions // tokens
        return place.blocks[slots], positions % tokens

    def write(self, place: Place, inputs: list[int], start: int, drafts: int) -> None:
        """Write KV; for states, those after the last token before drafts and after each draft."""
        group, end = place.group, start + len(inputs)
        if group.holds_state:
            positions = np.arange(end - 1 - drafts, end)
            targets, rows = place.blocks[place.running_slot :][: 1 + drafts], 0
        elif group.is_scratch:
            kept = end - group.block_tokens if _is_ring(group) else start
            positions = np.arange(max(start, kept), end)
            targets, rows = self._scratch(place, positions)
        else:
            positions = self._own(place.rank, start, end)
            targets = place.blocks[positions // group.block_tokens]
            rows = self._rows(group, positions)
        assert targets.all(), "the null block is written"
        place.words[targets, rows] = (
            np.array(inputs, np.int64)[positions - start, None] + group.group_id
        )
