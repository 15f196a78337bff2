"""A real engine preempts a request in the step that has just scheduled a chunk of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import BLOCK_TOKENS, Tokens, offloading, plain_answers, random_tokens

LOW = random_tokens(9 * BLOCK_TOKENS, seed=1)
HIGH = random_tokens(2 * BLOCK_TOKENS, seed=2)


def preempt_what_the_step_has_scheduled(models: Path) -> tuple[Tokens, Tokens]:
    """Answer `LOW` with ten blocks, of which `HIGH` takes one away; then again, reset.

    The second step after `HIGH` has come gives `LOW` the last two free blocks, then preempts it:
    `HIGH` needs one.
    """
    with offloading(
        models,
        scheduling_policy="priority",
        long_prefill_token_threshold=2 * BLOCK_TOKENS,
        max_num_batched_tokens=4 * BLOCK_TOKENS,
        blocks=11,
        max_model_len=10 * BLOCK_TOKENS,
    ) as ours:
        ours.add("low", LOW, max_tokens=8, priority=1)
        (low,) = ours.scheduler.requests.values()
        while low.num_computed_tokens < 4 * BLOCK_TOKENS:
            ours.step()
        ours.add("high", HIGH, max_tokens=2)
        answer = ours.run()["low"].outputs[0].token_ids
        assert ours.preemptions == 1
        ours.settle()
        (again,) = ours.reload([LOW])
        return list(answer), again


@pytest.mark.parametrize("mended", [True, False], ids=["mended", "control: as vLLM does"])
def test_a_block_that_nobody_computed_is_neither_served_nor_kept(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    if not mended:
        uncomputed = "kv_offload.engines.vllm.patches.mends._named_uncomputed"
        monkeypatch.setattr(uncomputed, lambda *_: iter(()))
    (expected,) = plain_answers(model_folder, [LOW])
    answer, again = preempt_what_the_step_has_scheduled(model_folder)
    assert (answer == expected) == mended
    assert (again == expected) == mended
