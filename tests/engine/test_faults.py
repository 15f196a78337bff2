"""A failed copy costs a cache entry or a recomputation: no wrong token, and not the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from kv_swap.engine import Direction

from kv_offload.engines.vllm.versions import reports_failed_requests, vllm_version
from tests.engine.harness import (
    BLOCK_TOKENS,
    Copies,
    engine,
    prompts_with_shared_prefix,
    random_tokens,
)

PROMPTS = [*prompts_with_shared_prefix(seed=7), random_tokens(3 * BLOCK_TOKENS, seed=3)]
"""The last ends with a block, so that all of it is loaded."""


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[str, list[list[int]]]:
    answers = {}
    for kind in ("qwen3", "gemma3"):
        with engine(model_folder, kind) as plain:
            answers[kind] = plain.generate(PROMPTS)
    return answers


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_failed_store_is_skipped_and_counted(
    model_folder: Path, copies: Copies, expected: dict[str, list[list[int]]], kind: str
) -> None:
    with engine(model_folder, kind, {}) as offloading:
        copies.fail(Direction.STORE)
        assert offloading.generate(PROMPTS) == expected[kind]
        offloading.settle()
        assert offloading.blocks_stored() == 0
        assert offloading.totals["skipped_copy_failed"] > 0
        assert offloading.offload.manager.slots_in_use == 0
        copies.release()
        offloading.reset_gpu_cache()
        assert offloading.generate(PROMPTS) == expected[kind]
        assert offloading.blocks_loaded() == 0
        offloading.reset_gpu_cache()
        # The copies work again, and so does host memory.
        assert offloading.generate(PROMPTS) == expected[kind]
        assert offloading.blocks_loaded() > 0
        offloading.assert_nothing_left()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_failed_load_is_recomputed(
    model_folder: Path, copies: Copies, expected: dict[str, list[list[int]]], kind: str
) -> None:
    """With one cache group and with two: the second has no hook below vLLM 0.32."""
    with engine(model_folder, kind, {}) as offloading:
        offloading.generate(PROMPTS)
        offloading.reset_gpu_cache()
        copies.fail(Direction.LOAD)
        assert offloading.generate(PROMPTS) == expected[kind]
        assert offloading.blocks_loaded() == 0
        assert offloading.totals["failed_loads"] > 0
        copies.release()
        offloading.reset_gpu_cache()
        assert offloading.generate(PROMPTS) == expected[kind]
        assert offloading.blocks_loaded() > 0
        offloading.assert_nothing_left()


def test_the_destination_of_a_failed_load_is_zeroed(model_folder: Path, copies: Copies) -> None:
    prompt = PROMPTS[0]
    with engine(model_folder, "qwen3", {}) as offloading:
        offloading.generate([prompt])
        offloading.reset_gpu_cache()
        for tensor in offloading.rank.transfer._state.keep_alive:
            tensor.fill_(float("nan"))
        copies.fail(Direction.LOAD)
        zeroed: list[int] = []
        zero = offloading.rank.transfer.zero_blocks

        def watch(blocks: list[int]) -> None:
            zero(blocks)
            zeroed.extend(blocks)
            for tensor in offloading.rank.transfer._state.keep_alive:
                assert not tensor[blocks].any()

        offloading.rank.transfer.zero_blocks = watch
        offloading.generate([prompt])
        assert len(zeroed) == (len(prompt) - 1) // 32


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_synchronous_load_is_copied_at_once(
    model_folder: Path,
    copies: Copies,
    expected: dict[str, list[list[int]]],
    async_scheduling: bool,
) -> None:
    """Its request runs in the step whose load failed, so the step waits for another copy."""
    with engine(
        model_folder, "qwen3", {}, synchronous_loads=True, async_scheduling=async_scheduling
    ) as offloading:
        assert offloading.generate(PROMPTS) == expected["qwen3"]
        offloading.reset_gpu_cache()
        copies.fail(Direction.LOAD, every=2)
        assert offloading.generate(PROMPTS) == expected["qwen3"]
        assert offloading.blocks_loaded() > 0
        assert offloading.totals["repaired_loads"] > 0
        assert offloading.totals["lost_requests"] == 0
        copies.release()
        offloading.assert_nothing_left()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_synchronous_load_that_nothing_can_bring_ends_its_requests_alone(
    model_folder: Path,
    copies: Copies,
    expected: dict[str, list[list[int]]],
    async_scheduling: bool,
) -> None:
    with engine(
        model_folder, "qwen3", {}, synchronous_loads=True, async_scheduling=async_scheduling
    ) as offloading:
        assert offloading.generate(PROMPTS) == expected["qwen3"]
        offloading.reset_gpu_cache()
        copies.fail(Direction.LOAD)
        offloading.add("fails", PROMPTS[0])
        offloading.add("runs", random_tokens(40, seed=5))
        finished = offloading.run()
        assert finished["fails"].outputs[0].finish_reason == "error"
        assert finished["fails"].outputs[0].token_ids == []
        assert finished["runs"].outputs[0].finish_reason == "length"
        assert offloading.blocks_loaded() == 0
        assert offloading.totals["lost_requests"] == 1
        copies.release()
        # Neither the engine's cache nor host memory has anything of what was computed.
        assert offloading.generate(PROMPTS) == expected["qwen3"]
        assert offloading.blocks_loaded() > 0
        offloading.reset_gpu_cache()
        assert offloading.generate(PROMPTS) == expected["qwen3"]
        offloading.assert_nothing_left()


def test_failing_may_be_chosen_over_recomputing(
    model_folder: Path, copies: Copies, expected: dict[str, list[list[int]]]
) -> None:
    """`on_load_failure: fail` ends that request alone, with an error."""
    with engine(model_folder, "qwen3", {"on_load_failure": "fail"}) as offloading:
        offloading.generate(PROMPTS[:1])
        offloading.reset_gpu_cache()
        copies.fail(Direction.LOAD)
        offloading.add("fails", PROMPTS[0])
        finished = offloading.run()
        assert finished["fails"].outputs[0].finish_reason == "error"
        copies.release()
        assert offloading.generate(PROMPTS) == expected["qwen3"]
        offloading.assert_nothing_left()


@pytest.mark.skipif(
    reports_failed_requests(vllm_version()), reason="this vLLM can fail requests of several groups"
)
def test_failing_is_refused_where_the_engine_cannot(model_folder: Path) -> None:
    with (
        pytest.raises(Exception, match="on_load_failure is 'fail'"),
        engine(model_folder, "gemma3", {"on_load_failure": "fail"}),
    ):
        pass


def test_a_refused_job_is_a_failed_store(model_folder: Path) -> None:
    """A job that the transfer engine refuses before copying is reported like a failed copy."""
    with engine(model_folder, "qwen3", {}) as offloading:
        offloading.rank.transfer.num_slots = 0
        offloading.generate(PROMPTS[:1])
        offloading.settle()
        assert offloading.totals["skipped_copy_failed"] > 0
        offloading.rank.transfer.num_slots = offloading.rank.num_slots
        offloading.assert_nothing_left()
