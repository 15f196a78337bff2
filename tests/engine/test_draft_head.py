"""Speculative decoding with a draft head, whose KV is in the blocks of the model's own.

Wrong KV of the head changes no token, since the model checks every draft, but it changes how many
are accepted. So these tests compare tokens, accepted drafts, and the bytes of every layer.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import (
    BLOCK_TOKENS,
    Drafts,
    Engine,
    draft_head,
    engine,
    offloading,
    random_tokens,
)
from tests.support.slow import rest_is_slow

MODEL_LAYERS = 2
PROMPT = random_tokens(200, seed=41)


@pytest.fixture
def head(model_folder: Path) -> dict[str, Any]:
    return draft_head(model_folder)


def kv_layers(running: Engine) -> list[Any]:
    """Return the KV tensors of all layers, the model's first."""
    context = running.core.vllm_config.compilation_config.static_forward_context
    names = running.scheduler.kv_cache_config.kv_cache_groups[0].layer_names
    return [context[name].kv_cache for name in names]


def corrupt(running: Engine, layers: list[Any]) -> None:
    """Flip signs in host memory, of these layers only; no number becomes a NaN."""
    regions = {region.address: region for region in running.rank.transfer.layout.regions}
    for layer in layers:
        region = regions[layer.data_ptr()]
        start = region.slot_offset_bytes
        running.slots[:, start : start + region.page_bytes] ^= 0x80


def digests(running: Engine) -> dict[bytes, list[str]]:
    """Return a digest per layer of every block in the engine's prefix cache, by key."""
    layers = kv_layers(running)
    assert len(layers) > MODEL_LAYERS, "the head's layers are in the model's cache group"
    found = {}
    for block in running.pool.blocks:
        if block.block_hash is not None:
            pages = [layer[block.block_id].contiguous() for layer in layers]
            found[bytes(block.block_hash)] = [
                hashlib.sha256(ctypes.string_at(page.data_ptr(), page.nbytes)).hexdigest()
                for page in pages
            ]
    return found


@pytest.mark.parametrize("method", rest_is_slow(["eagle", "draft_model"]))
def test_blocks_of_a_drafter_are_stored_and_served_again(model_folder, head, method):
    """Prompt and answer are stored while drafts are accepted and rejected; then all is served.

    A drafter that is a separate model, here the same, reads only tokens, so its KV is determined by
    its block's hash. Two controls follow: first only the drafter's layers are corrupted, then the
    model's.
    """
    served = 7 if method == "eagle" else 8
    if method == "draft_model":
        head = {**head, "method": method, "model": str(model_folder / "llama")}
    arguments = {"speculative_config": head, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with engine(model_folder, "llama", **arguments) as plain:
        drafts = Drafts(plain)
        (expected,) = plain.generate([PROMPT], max_tokens=80)
        expected_drafts = drafts.take()
        follow_up = [*PROMPT, *expected, 7]
        expected_after = plain.generate([follow_up], max_tokens=40)
        expected_drafts_after = drafts.take()
        assert plain.cached_tokens == [BLOCK_TOKENS * served]
        expected_digests = sorted(digests(plain).values())  # each engine has different keys
    with offloading(model_folder, "llama", **arguments) as ours:
        drafts = Drafts(ours)
        assert ours.generate([PROMPT], max_tokens=80) == [expected]
        checked, accepted = drafts.take()
        assert (checked, accepted) == expected_drafts
        assert accepted > 0
        assert accepted < checked or method == "draft_model"
        stored = digests(ours)
        assert ours.reload([follow_up], max_tokens=40) == expected_after
        assert drafts.take() == expected_drafts_after
        # The last sampled token was never an input: 8 blocks are stored. Of the eighth block, the
        # last token's KV in a head may not fit what follows, so it is computed.
        assert len(stored) == (len(PROMPT) + len(expected) - 1) // BLOCK_TOKENS == 8
        assert ours.blocks_loaded() == served
        assert ours.cached_tokens == [BLOCK_TOKENS * served]
        found = digests(ours)
        assert {key: found[key] for key in stored} == stored
        assert sorted(found.values()) == expected_digests

        checked, accepted = expected_drafts_after
        ours.forget()
        corrupt(ours, kv_layers(ours)[MODEL_LAYERS:])
        assert ours.generate([follow_up], max_tokens=40) == expected_after
        checked_then, accepted_then = drafts.take()
        assert accepted_then / checked_then < accepted / checked / 2
        assert sorted(digests(ours).values()) != expected_digests
        ours.forget()
        corrupt(ours, kv_layers(ours)[:MODEL_LAYERS])
        assert ours.generate([follow_up], max_tokens=40) != expected_after
