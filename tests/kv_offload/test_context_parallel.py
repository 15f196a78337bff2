"""Context parallelism with vLLM's own scheduler: which rank has which tokens of a block."""

from __future__ import annotations

import pytest

from kv_offload.cache.prefix import CacheGroup
from tests.support.played_cases import FULL, OTHER, PROMPT, both_ways, store
from tests.support.played_engine import PlayedEngine

TEXT = [*PROMPT, *OTHER]


def serve_again(engine: PlayedEngine, hit_tokens: int = 40) -> None:
    """Store a text, serve it again, and check every rank's bytes and every token."""
    store(engine, TEXT)
    engine.check_host_memory()
    engine.serve("again", TEXT)
    assert engine.totals["hit_tokens"] == hit_tokens
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize(
    ("groups", "hit_tokens"),
    [((FULL,), 40), ((FULL, CacheGroup(1, 8)), 32)],
    ids=["one group", "blocks of two sizes"],
)
def test_tokens_of_a_block_may_alternate_between_ranks_in_any_runs(interleave, groups, hit_tokens):
    """A token's rank is the same in every block, so it need not be in the key."""
    engine = PlayedEngine(
        groups, ranks=2, context_ranks=2, interleave=interleave, plugin={"max_pinned_share": 1.0}
    )
    assert engine.hash_block_tokens == 8
    serve_again(engine, hit_tokens)


@both_ways
@pytest.mark.parametrize(("prefill_ranks", "context_ranks"), [(2, 1), (2, 2), (2, 4), (4, 1)])
def test_ranks_that_share_a_prefill_have_all_tokens_unless_decodes_split_them(
    prefill_ranks, context_ranks
):
    """Every rank of a shared prefill gathers the KV of all, so blocks do not grow with ranks."""
    engine = PlayedEngine(
        groups=(CacheGroup(0, 8 // context_ranks),),
        ranks=4,
        prefill_ranks=prefill_ranks,
        context_ranks=context_ranks,
    )
    assert engine.hash_block_tokens == 8, "vLLM's own answer"
    serve_again(engine)


@both_ways
@pytest.mark.parametrize("ranks", [{"context_ranks": 2}, {"prefill_ranks": 2}], ids=str)
def test_drafts_of_a_head(ranks):
    engine = PlayedEngine(groups=(CacheGroup(0, 4),), ranks=2, drafts=2, draft_head=True, **ranks)
    store(engine, TEXT)
    engine.check_host_memory()
    engine.serve("again", TEXT)
    # All whole blocks but the last, which proves what the head has read ahead.
    assert engine.totals["hit_tokens"] == 40 - engine.hash_block_tokens
    engine.check_rest()
