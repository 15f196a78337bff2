"""A draft head with vLLM's own scheduler: which of its KV is final, stored, and served again.

The head writes last, after all hooks of the step have run. For every token that the model has
computed, it writes KV that depends on the next token. After those it guesses: what it writes there
is garbage until the next step rewrites it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm.config import SpeculativeConfig

from kv_offload.cache.prefix import CacheGroup
from tests.support.played_cases import (
    FULL,
    OTHER,
    PROMPT,
    WINDOW,
    both_runners,
    both_ways,
    forget,
    serve_under_pressure,
    store,
)
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import (
    VOCABULARY,
    Draft,
    Place,
    PlayedModel,
    Tokens,
    answer,
    name_prefix,
)
from tests.support.timing import Harsh

DRAFTS = 3
GUESS = -0x6E55
BRANCH = [*PROMPT[:16], PROMPT[16] ^ 1, 1, 0, 0, 1]
"""Four blocks of `PROMPT`, and then other tokens."""


class PlayedHead(PlayedModel):
    """A model with a draft head: the last word of a token's KV is the head's.

    The head's KV of a token is the name of the prefix up to the next token. With `strict` every
    word that is read must be exactly that; without, any token may follow the last token of a block,
    as in vLLM's own cache where prefixes diverge after a block. If a group is known to hold the
    head's layers, the others hold none.
    """

    strict = True

    @property
    def heads(self) -> Sequence[CacheGroup]:
        attention = [group for group in self.groups if not group.holds_state]
        return [group for group in attention if group.sees_next_token] or attention

    def forward_request(self, request_id: str, computed: int, output: Any, draft: Draft) -> Tokens:
        request = self.requests[request_id]
        start = min(computed, len(request.tokens) - 1)
        scheduled = output.num_scheduled_tokens[request_id]
        sampled = super().forward_request(request_id, computed, output, draft)
        names = request.extend_names(self.weights)
        # The last sampled token has no KV yet, and rejected drafts have none.
        end = min(start + scheduled, len(names) - 1)
        for group in self.heads:
            blocks = request.block_ids[group.group_id]
            for position in range(start, min(end + DRAFTS - 1, len(blocks) * group.block_tokens)):
                block = blocks[position // group.block_tokens]
                head = names[position + 1] + group.group_id if position < end else GUESS
                if block:
                    for kv in self.kv:
                        kv[group.group_id][block, position % group.block_tokens, -1] = head
        return sampled

    def check(self, place: Place, names: list[int], start: int) -> bool:
        group = place.group
        right = super().check(self.without_head(place), names, start)
        if group not in self.heads:
            return right
        for position in range(group.first_needed_token(start), start):
            inside = position % group.block_tokens
            block = place.blocks[position // group.block_tokens]
            found = int(place.words[block, inside, -1]) - group.group_id
            expected = {names[position + 1]}
            if not self.strict and inside == group.block_tokens - 1:
                expected = successors(names[position])
            assert found in expected, f"{place.request_id}: wrong KV at {position} of the head"
        return right

    def write(self, place: Place, inputs: list[int], start: int, drafts: int) -> None:
        super().write(self.without_head(place), inputs, start, drafts)

    def without_head(self, place: Place) -> Place:
        words = place.words[..., :-1] if place.group in self.heads else place.words
        return dataclasses.replace(place, words=words)


def successors(name: int) -> set[int]:
    return {name_prefix(name, token) for token in range(VOCABULARY)}


class HeadEngine(PlayedEngine):
    """Drafts with a head, in turn right, half right and wrong."""

    model_class = PlayedHead

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, drafts=DRAFTS, draft_head=True, **{"timing": Harsh(), **more})
        self.accepted = self.rejected = 0
        self.propose = self.mixed_drafts

    def mixed_drafts(self, tokens: Tokens) -> Tokens:
        good = self.good_drafts(tokens)
        right = (len(tokens) + sum(tokens)) % (len(good) + 1)
        self.accepted += right
        self.rejected += len(good) - right
        return [*good[:right], *((token + 1) % VOCABULARY for token in good[right:])]

    def check_names(
        self, group: CacheGroup, found: NDArray[np.int64], names: NDArray[np.int64]
    ) -> None:
        """Check blocks; for the last token's KV in the head, check that it was written."""
        if group not in self.model.heads:
            return super().check_names(group, found, names)
        super().check_names(group, found[:, :, :-1], names)
        heads = found[:, :, -1]
        assert (heads[:, :-1] == names[:, 1:]).all(), "a block holds another prefix in the head"
        for last, name in zip(heads[:, -1].tolist(), names[:, -1].tolist(), strict=True):
            assert last in successors(name), "a block holds another prefix's end"
        return None


def run_to_the_end(engine: HeadEngine) -> None:
    while engine.scheduler.has_requests():
        engine.step()


@both_ways
@both_runners
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_a_store_reads_what_the_head_wrote_last(groups):
    """In chunks of a prompt and in decodes, with accepted and rejected drafts."""
    engine = HeadEngine(groups, timing=Harsh(eager=True), ranks=2, max_num_batched_tokens=8)
    engine.add("a", PROMPT, max_tokens=40)
    engine.add("b", OTHER, max_tokens=30)
    run_to_the_end(engine)
    assert engine.accepted > 10
    assert engine.rejected > 10
    assert engine.totals["stored_bytes"] > 0
    assert engine.timing.poisoned_blocks > 0
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_what_a_request_leaves_behind_is_final(max_tokens):
    """It may end with drafts accepted past its end, anywhere in a block."""
    engine = HeadEngine(timing=Harsh(eager=True))
    engine.propose = engine.good_drafts
    store(engine, PROMPT[:14])
    engine.add("a", PROMPT, max_tokens=max_tokens)
    run_to_the_end(engine)
    text = [*PROMPT, *engine.answers["a"]]
    assert text == [*PROMPT, *answer(PROMPT, max_tokens)]
    assert engine.scheduler.reset_prefix_cache() is True
    follow_up = [*text, 0, 1, 1, 0, 1]
    computed = len(text) - 1
    engine.totals.clear()
    hashes = engine.add("b", follow_up).block_hashes[: computed // 4]
    known = engine.offload.manager.readable(hashes).sum()
    run_to_the_end(engine)
    # A block filled by the last step's drafts has no hash: its request is not scheduled again.
    assert known in (computed // 4, computed // 4 - 1)
    assert engine.totals["hit_tokens"] == (known - 1) * 4, "all but the block behind the hit"
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_a_hit_drops_the_last_block_that_matches(groups):
    engine = store(HeadEngine(groups), PROMPT)
    for request_id, prompt, hit in [("same", PROMPT, 16), ("branch", BRANCH, 12)]:
        engine.serve(request_id, prompt)
        assert engine.totals["hit_tokens"] == hit
        assert engine.scheduler.reset_prefix_cache() is True
        engine.totals.clear()
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("known", [True, False], ids=["known", "any group's"])
def test_a_window_that_vllm_names_where_prompts_end_is_served(known):
    """After the end of a hit, vLLM names a window's block only where that may be the head's."""
    full = dataclasses.replace(FULL, sees_next_token=known)
    groups = (full, dataclasses.replace(WINDOW, retention_tokens=0))
    engine = store(HeadEngine(groups), PROMPT)
    for request_id, prompt in [("same", PROMPT), ("longer", [*PROMPT, 1, 0, 0, 1, 1])]:
        engine.serve(request_id, prompt)
        assert engine.totals["hit_tokens"] == 16
        forget(engine)
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("synchronous_loads", [False, True])
@pytest.mark.parametrize(
    "windows",
    [[], [WINDOW], [dataclasses.replace(WINDOW, retention_tokens=0)]],
    ids=["full", "window", "window at ends"],
)
def test_a_user_may_have_the_last_block_that_matches_kept(synchronous_loads, windows, monkeypatch):
    """So a window that vLLM keeps only at a prompt's end is served, as vLLM serves it."""
    monkeypatch.setattr(SpeculativeConfig, "use_eagle_block_drop", lambda _: False)
    engine = HeadEngine((FULL, *windows), synchronous_loads=synchronous_loads)
    engine.model.strict = False
    store(engine, PROMPT)
    for prompt in (PROMPT, [*PROMPT, 1, 0, 0, 1, 1]):
        engine.serve("again", prompt)
        assert engine.totals["hit_tokens"] == 20
        forget(engine)
    if not windows:
        engine.serve("all of it", PROMPT[:20])
        assert engine.totals["hit_tokens"] == 20 - synchronous_loads
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("known", [5, 9, 13, 16, 17])
def test_a_hit_goes_on_where_the_engines_own_has_dropped_a_block(known):
    """The engine has a part of the prompt, the last block of it followed by another token."""
    engine = HeadEngine()
    longer = [*PROMPT, 1, 0, 0, 1]
    store(engine, longer)
    engine.serve("known", [*PROMPT[: known - 1], PROMPT[known - 1] ^ 1], max_tokens=1)
    engine.totals.clear()
    engine.serve("a", longer)
    own = max(0, (known - 1) // 4 * 4 - 4)
    assert engine.totals["lookup_tokens"] == len(longer) - own
    assert engine.totals["hit_tokens"] == 20 - own
    engine.check_rest()


def test_nothing_is_loaded_that_no_block_behind_it_proves():
    """The engine's own hit and host memory end at the same block."""
    engine = store(HeadEngine(), PROMPT)
    engine.serve("known", PROMPT, max_tokens=1)
    engine.totals.clear()
    engine.serve("a", [*PROMPT[:20], PROMPT[20] ^ 1, 0])
    assert engine.totals["hit_tokens"] == 0
    engine.check_rest()


@both_ways
@both_runners
def test_requests_that_part_are_preempted_and_end_early():
    """Tokens are right throughout; the head's KV, except for the last token of a block."""
    engine = HeadEngine(blocks=20, slots=40, max_model_len=60, plugin={"max_pinned_share": 0.5})
    engine.model.strict = False
    serve_under_pressure(engine)
    engine.rest()
