"""Kinds of KV cache other than full attention and windows, as far as the CPU engine has them."""

from __future__ import annotations

import pytest

from tests.engine.harness import all_differ, engine, offloading, prompts_with_shared_prefix

PROMPTS = prompts_with_shared_prefix(shared=500, tails=(21, 25, 40, 85), seed=3)
KINDS = [
    pytest.param("llama4", {}, id="chunks"),
    pytest.param(
        "qwen3_next",
        {"dtype": "bfloat16", "enable_prefix_caching": True},
        id="gated delta nets",
    ),
]


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_reloaded_prompts_give_the_same_tokens(model_folder, kind, arguments):
    """Compares with an engine without the plugin, and ends with corrupted host memory."""
    with engine(model_folder, kind, **arguments) as plain:
        # vLLM makes blocks as large as a state, whose type depends on the processor.
        block_tokens = plain.scheduler.cache_config.block_size
        # Its second answers compute what ours compute after loading the prompts' whole blocks.
        expected = [plain.generate_each(PROMPTS), plain.generate_each(PROMPTS)]
    with offloading(model_folder, kind, **arguments) as ours:
        computed = ours.generate_each(PROMPTS)
        reloaded = ours.reload(PROMPTS, one_by_one=True)
        assert [computed, reloaded] == expected
        whole = [(len(prompt) - 1) // block_tokens * block_tokens for prompt in PROMPTS]
        assert ours.cached_tokens == whole
        assert all(whole)
        ours.settle()
        # The same tokens end in the same blocks, which host memory has.
        assert ours.blocks_stored() == 0
        assert all_differ(ours.reload(PROMPTS, one_by_one=True, corrupted=True), reloaded)


@pytest.mark.slow  # `tests/kv_offload/test_hits_inside_blocks.py` plays it in `make test`
def test_a_hit_inside_a_block_gives_the_same_tokens(model_folder):
    """The first answers compute the same: vLLM ends a chunk of a prompt at its last hash."""
    unit = 16
    arguments = {**KINDS[1].values[1], "prefix_match_unit": unit}
    with engine(model_folder, "qwen3_next", **arguments) as plain:
        block_tokens = plain.scheduler.cache_config.block_size
        expected = plain.generate_each(PROMPTS)
    with offloading(model_folder, "qwen3_next", **arguments) as ours:
        computed = ours.generate_each(PROMPTS)
        reloaded = ours.reload(PROMPTS, one_by_one=True)
        assert [computed, reloaded] == [expected, expected]
        assert ours.cached_tokens == [(len(prompt) - 1) // unit * unit for prompt in PROMPTS]
        assert any(tokens % block_tokens for tokens in ours.cached_tokens)
        ours.settle()
        assert ours.blocks_stored() == 0
        assert all_differ(ours.reload(PROMPTS, one_by_one=True, corrupted=True), reloaded)
