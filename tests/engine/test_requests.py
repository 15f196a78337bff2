"""Requests control their blocks, on a real engine."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.harness import (
    BLOCK_TOKENS,
    all_differ,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
)

PROMPTS = prompts_with_shared_prefix()
PRESSURE = [random_tokens(300, seed=100 + number) for number in range(16)]
"""More blocks than the host memory of these tests has slots."""


def says(**hints: Any) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"kv_offload": hints}}}


def test_retained_prompts_are_right_under_pressure(model_folder):
    """And a prompt that must not be stored is not found afterwards. With a control."""
    expected = plain_answers(model_folder, PROMPTS)
    secret = random_tokens(300, seed=99)
    plugin = {"cpu_bytes": "2MiB", "max_retained_share": 0.5, "max_retained_share_per_salt": 0.5}
    with offloading(model_folder, plugin=plugin) as ours:
        for number, prompt in enumerate(PROMPTS):
            ours.add(str(number), prompt, **says(retain_seconds=3600))
        ours.add("secret", secret, **says(store=False))
        with pytest.raises(VLLMValidationError, match=r"retain_seconds: 0 is not allowed\. Give "):
            ours.add("wrong", PROMPTS[0], **says(retain_seconds=0))
        finished = ours.run()
        assert [list(finished[str(n)].outputs[0].token_ids) for n in range(4)] == expected
        ours.settle()
        retained = ours.offload.gauges()["retained_slots"]
        assert retained >= 300 // BLOCK_TOKENS
        for prompt in PRESSURE:
            ours.generate([prompt])
            ours.settle()
        assert ours.offload.manager.evictions > 0
        assert ours.offload.gauges()["retained_slots"] == retained
        assert ours.reload(PROMPTS) == expected
        assert min(ours.cached_tokens) >= 300 // BLOCK_TOKENS * BLOCK_TOKENS
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)
        ours.forget()
        ours.generate([secret])
        assert ours.blocks_loaded() == 0
        ours.offload.resets.reset_cache()
        assert ours.offload.gauges()["retained_slots"] == 0
