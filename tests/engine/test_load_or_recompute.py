"""A link that is slower than computing has prompts computed, a faster one has them loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kv_swap.engine import Completion, Direction

from tests.engine.harness import BLOCK_TOKENS, engine, random_tokens

PROMPTS = [random_tokens(400 + index, seed=70 + index) for index in range(4)]
STORED_TOKENS = 400 // BLOCK_TOKENS * BLOCK_TOKENS
FAST, SLOW = 1e15, 1.0
"""Bytes per second of the link: on any machine far faster, and far slower, than computing."""


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> list[list[int]]:
    """The answers of an engine without the plugin."""
    with engine(model_folder) as plain:
        return [plain.generate([prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
def test_what_is_sooner_is_done_and_the_tokens_stay_the_same(
    model_folder: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    synchronous: bool,
) -> None:
    monkeypatch.setattr("kv_offload.worker.copies.MEASURED_BYTES", 1)
    with engine(model_folder, plugin={}, synchronous_loads=synchronous) as offloading:
        speed, poll = FAST, offloading.rank.transfer.poll

        def timed_poll() -> list[Completion]:
            """Tell of loads as if the link had the speed of the moment."""
            return [
                replace(done, seconds=done.nbytes / speed)
                if done.direction is Direction.LOAD
                else done
                for done in poll()
            ]

        offloading.rank.transfer.poll = timed_poll

        def serve() -> int:
            """Serve all prompts, one by one; return how many blocks were loaded for them."""
            before = offloading.blocks_loaded()
            offloading.reset_gpu_cache()
            assert [offloading.generate([prompt])[0] for prompt in PROMPTS] == expected
            return offloading.blocks_loaded() - before

        serve()
        assert serve() == len(PROMPTS) * STORED_TOKENS // BLOCK_TOKENS
        assert offloading.totals["recomputed_tokens"] == 0
        watch = offloading.offload.watch
        assert watch.prefill_rate.tokens_per_second is not None
        assert watch.load_rate.measured_bytes_per_second is not None
        speed = SLOW
        for _ in range(6):
            if not offloading.totals["recomputed_tokens"]:
                serve()  # until most loads that are remembered were slow ones
        offloading.slots[:] ^= 0x40  # what is computed does not care
        offloading.totals["recomputed_tokens"] = 0
        assert serve() == 0
        assert offloading.totals["recomputed_tokens"] == len(PROMPTS) * STORED_TOKENS
        offloading.assert_nothing_left()
