"""Tight GPU caches, tight pools and what is not stored; each test has its own engine."""

from __future__ import annotations

from pathlib import Path

from kv_swap.engine import Direction

from tests.engine.copies import Copies
from tests.engine.harness import BLOCK_TOKENS, engine, offloading, plain_answers, random_tokens

LONG = random_tokens(10 * BLOCK_TOKENS + 1, seed=2)


def test_preempted_requests_resume_with_the_same_answer(model_folder: Path) -> None:
    prompts = [random_tokens(150 + 8 * i, seed=20 + i) for i in range(6)]
    expected = plain_answers(model_folder, prompts, max_tokens=120)
    with offloading(model_folder, blocks=28, max_model_len=512) as tight:
        assert tight.generate(prompts, max_tokens=120) == expected
        assert tight.preemptions, "the test must preempt"
        assert tight.reload(prompts, max_tokens=120) == expected


def test_eviction_keeps_answers_right(model_folder: Path) -> None:
    prompts = [random_tokens(200, seed=40 + i) for i in range(6)]
    expected = plain_answers(model_folder, prompts)
    with offloading(model_folder, plugin={"cpu_bytes": "512KiB"}) as ours:
        for _ in range(3):
            for prompt, answer in zip(prompts, expected, strict=True):
                assert ours.generate([prompt]) == [answer]
                ours.reset_gpu_cache()
                ours.offload.manager.check_integrity()
        assert ours.totals["evictions"] > 0
        assert ours.reload(prompts[:-3:-1], one_by_one=True) == expected[:-3:-1]


def test_store_after_uses_keeps_only_what_is_seen_again(model_folder: Path) -> None:
    with offloading(model_folder, plugin={"store_after_uses": 2}) as ours:
        for stored in (0, 10):
            ours.generate([LONG], max_tokens=1)
            ours.reset_gpu_cache()
            assert ours.blocks_stored() == stored
        assert ours.totals["skipped_used_too_little"] == 10


def test_shutdown_with_work_in_flight(model_folder: Path, copies: Copies) -> None:
    with engine(model_folder, plugin={}) as ours:
        copies.hold(Direction.STORE)
        ours.add("only", LONG, max_tokens=2)
        ours.run()
        engine_thread = ours.rank.transfer._thread
        assert engine_thread.is_alive()
        copies.release()
    engine_thread.join(120)
    assert not engine_thread.is_alive()
