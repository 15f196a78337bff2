"""Several MTP modules with vLLM's own scheduler: what their windows keep, and how hits end."""

from __future__ import annotations

from typing import Any

import pytest

from kv_offload.cache.prefix import CacheGroup
from tests.support.played_cases import (
    FULL,
    OTHER,
    PROMPT,
    both_runners,
    both_ways,
    serve_under_pressure,
    store,
)
from tests.support.played_engine import PlayedEngine

MODULES = 4
WINDOW = CacheGroup(1, 4, 5)
"""A query reads one block of it, and vLLM keeps one block more of tokens for the modules."""
LONG = [*PROMPT, *OTHER]


def engine_of(*groups: CacheGroup, **more: Any) -> PlayedEngine:
    arguments = {"drafts": MODULES, "draft_head": True, "modules": MODULES, "max_model_len": 60}
    return PlayedEngine(groups, **arguments, **more)


@both_ways
@both_runners
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_what_is_stored_and_served(groups):
    engine = engine_of(*groups, blocks=18 * len(groups), slots=60)
    serve_under_pressure(engine)
    engine.rest()


def serve_a_part_of_what_was_loaded(engine: PlayedEngine) -> PlayedEngine:
    """Load a prompt, and serve another whose window is the block before the loaded one's."""
    store(engine, LONG)
    engine.serve("loaded", LONG)
    hit = int(engine.totals["hit_tokens"])
    assert hit == 32, "up to the proof, and what the modules may write again has no name"
    engine.totals.clear()
    engine.serve("branch", [*LONG[:hit], LONG[hit] ^ 1, 1, 0])
    assert engine.totals["lookup_tokens"] == 3 + 4, "the engine's own cache has the others"
    return engine


@both_ways
def test_blocks_before_a_window_that_vllm_names_were_loaded():
    serve_a_part_of_what_was_loaded(engine_of(FULL, WINDOW)).check_rest()
