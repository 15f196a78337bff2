"""Groups of which a hit needs nothing, with vLLM's own scheduler.

A ring has the tokens not yet compressed, and must have them when a step begins. So does a window of
tokens that a latent will cover, but vLLM gives its blocks to other requests, too. A window that is
replayed is empty before the first token that its request has computed.
"""

from __future__ import annotations

from itertools import chain

import pytest

from kv_offload.cache.prefix import CacheGroup
from tests.support.played_cases import (
    FULL,
    OTHER,
    PROMPT,
    RING,
    both_runners,
    both_ways,
    harsh_engine,
    serve_under_pressure,
    store,
)
from tests.support.played_engine import PlayedEngine

REPLAY = CacheGroup(1, 4, window_tokens=8, is_scratch=True)
CASES: dict[str, tuple[tuple[CacheGroup, ...], int]] = {
    "ring": ((FULL, RING), 27),
    "ring first": ((CacheGroup(0, 4, chunk_tokens=4, is_scratch=True), CacheGroup(1, 4)), 27),
    "replay": ((FULL, REPLAY), 36),
    "open latents": ((FULL, CacheGroup(1, 2, chunk_tokens=4, is_scratch=True)), 42),
    "kept at ends": (
        (
            *(CacheGroup(0, 8), CacheGroup(1, 4, 9, retention_tokens=0)),
            CacheGroup(2, 2, 4, retention_tokens=0),
            CacheGroup(3, 1, chunk_tokens=4, is_scratch=True),
        ),
        52,
    ),
    "blocks of four sizes": (
        (
            *(CacheGroup(0, 8), CacheGroup(1, 4, 9), CacheGroup(2, 2, 4)),
            CacheGroup(3, 1, chunk_tokens=1, is_scratch=True),
        ),
        46,
    ),
    "states": ((FULL, RING, CacheGroup(2, 4, 9), CacheGroup(3, 4, holds_state=True)), 58),
}
"""Groups, and a number of blocks that is too small for some requests."""


@both_ways
@both_runners
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize(("groups", "blocks"), CASES.values(), ids=CASES)
def test_what_is_stored_and_served(drafts, groups, blocks):
    engine = harsh_engine(
        groups,
        drafts=drafts,
        blocks=blocks,
        slots=80,
        max_model_len=60,
        plugin={"max_pinned_share": 0.5},
    )
    serve_under_pressure(engine)
    stored = {engine.known[key][1] for key in engine.offload.manager.readable_slots()}
    assert stored == {group.group_id for group in groups if not group.is_scratch}
    engine.rest()


@both_ways
def test_no_block_of_scratch_is_copied():
    engine = store(PlayedEngine((FULL, RING)), PROMPT)
    assert len(engine.offload.manager.readable_slots()) == 4, "vLLM names two blocks at a time"
    request = engine.add("b", PROMPT)
    output = engine.schedule()
    (load,) = output.kv_connector_metadata.loads
    attention, ring = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert set(chain(*load.pairs[:, :1].tolist())) == set(attention[:4])
    assert len(ring) == 1
    engine.rest()


@both_ways
def test_tokens_of_complete_latents_are_neither_stored_nor_loaded():
    """vLLM gives a request blocks for them, and later gives these to others by their hash."""
    groups = (FULL, CacheGroup(1, 2, chunk_tokens=4, is_scratch=True))
    engine = store(PlayedEngine(groups), PROMPT)
    assert len(engine.offload.manager.readable_slots()) == 5
    request = engine.add("b", PROMPT)
    output = engine.schedule()
    (load,) = output.kv_connector_metadata.loads
    attention, _ = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert set(chain(*load.pairs[:, :1].tolist())) == set(attention[:5])
    engine.run()
    engine.add("c", [*PROMPT[:20], *OTHER])
    engine.step(copies=True)
    assert engine.model.requests["c"].first_computed == 20
    assert engine.totals["hit_tokens"] == 20, "the second hit is vLLM's own"
    engine.rest()


@both_ways
def test_a_window_is_replayed_after_a_hit():
    """vLLM recomputes the last window of a hit, since no load brings it."""
    engine = store(PlayedEngine((FULL, REPLAY)), PROMPT)
    engine.add("b", [*PROMPT, *OTHER])
    while "b" not in engine.model.requests:
        engine.step(copies=True)
    assert engine.totals["hit_tokens"] == 20
    assert engine.model.requests["b"].first_computed == 12
    engine.rest()


@both_ways
@pytest.mark.parametrize("groups", [(FULL, RING), (FULL, REPLAY)], ids=["ring", "replay"])
def test_a_hit_ends_before_the_last_block_of_a_prompt_that_fills_it(groups):
    """Its last token alone could not be recomputed: scratch lacks the tokens before it."""
    engine = store(PlayedEngine(groups), PROMPT)
    engine.serve("all of it", PROMPT[:20])
    assert engine.totals["hit_tokens"] == 16
    engine.check_rest()
