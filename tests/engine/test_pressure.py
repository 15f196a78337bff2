"""Tight GPU caches, tight pools and the rules for what is stored; each test has its own engine."""

from __future__ import annotations

from pathlib import Path

from kv_swap.engine import Direction

from tests.engine.harness import BLOCK_TOKENS, Copies, engine, random_tokens

LONG = random_tokens(10 * BLOCK_TOKENS + 1, seed=2)


def test_preempted_requests_resume_with_the_same_answer(model_folder: Path) -> None:
    prompts = [random_tokens(150 + 8 * i, seed=20 + i) for i in range(6)]
    with engine(model_folder, blocks=400) as roomy:
        expected = roomy.generate(prompts, max_tokens=120)
    with engine(model_folder, plugin={}, blocks=28, max_model_len=512) as tight:
        preempted = []
        preempt = tight.scheduler._preempt_request
        tight.scheduler._preempt_request = lambda request, *args, **more: (
            preempted.append(request.request_id),
            preempt(request, *args, **more),
        )
        assert tight.generate(prompts, max_tokens=120) == expected
        assert preempted, "the test must preempt"
        tight.reset_gpu_cache()
        assert tight.generate(prompts, max_tokens=120) == expected
        assert tight.blocks_loaded() > 0
        tight.assert_nothing_left()


def test_eviction_keeps_answers_right(model_folder: Path) -> None:
    prompts = [random_tokens(200, seed=40 + i) for i in range(6)]
    with engine(model_folder) as reference:
        expected = reference.generate(prompts)
    with engine(model_folder, plugin={"cpu_bytes": "512KiB"}) as offloading:
        for _ in range(3):
            for prompt, answer in zip(prompts, expected, strict=True):
                assert offloading.generate([prompt]) == [answer]
                offloading.reset_gpu_cache()
                offloading.offload.manager.check_integrity()
        assert offloading.totals["evictions"] > 0
        for prompt, answer in zip(reversed(prompts[-2:]), reversed(expected[-2:]), strict=True):
            assert offloading.generate([prompt]) == [answer]
        assert offloading.blocks_loaded() > 0
        offloading.assert_nothing_left()


def test_store_after_uses_keeps_only_what_is_seen_again(model_folder: Path) -> None:
    with engine(model_folder, plugin={"store_after_uses": 2}) as offloading:
        offloading.generate([LONG], max_tokens=1)
        offloading.reset_gpu_cache()
        assert offloading.blocks_stored() == 0
        assert offloading.totals["skipped_used_too_little"] == 10
        offloading.generate([LONG], max_tokens=1)
        offloading.reset_gpu_cache()
        assert offloading.blocks_stored() == 10


def test_decoded_blocks_are_stored_unless_only_prompts_are(model_folder: Path) -> None:
    prompt = random_tokens(BLOCK_TOKENS, seed=50)
    for plugin, blocks in (({}, 3), ({"store_blocks": "prompt"}, 1)):
        with engine(model_folder, plugin=plugin) as offloading:
            offloading.generate([prompt], max_tokens=2 * BLOCK_TOKENS + 1)
            offloading.settle()
            assert offloading.blocks_stored() == blocks


def test_shutdown_with_work_in_flight(model_folder: Path, copies: Copies) -> None:
    with engine(model_folder, plugin={}) as offloading:
        copies.hold(Direction.STORE)
        offloading.add("only", LONG, max_tokens=2)
        offloading.run()
        engine_thread = offloading.rank.transfer._thread
        assert engine_thread.is_alive()
        copies.release()
    engine_thread.join(120)
    assert not engine_thread.is_alive()
