"""A link that is slower than computing has prompts computed, a faster one has them loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kv_swap.engine import Completion, Direction

from tests.engine.harness import BLOCK_TOKENS, offloading, plain_answers, random_tokens

PROMPTS = [random_tokens(400 + index, seed=70 + index) for index in range(4)]
STORED_TOKENS = 400 // BLOCK_TOKENS * BLOCK_TOKENS
FAST, SLOW = 1e15, 1.0
"""Bytes per second of the link: on any machine far faster, and far slower, than computing."""


def test_what_is_sooner_is_done_and_the_tokens_stay_the_same(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_answers(model_folder, PROMPTS, one_by_one=True)
    monkeypatch.setattr("kv_offload.worker.copies.MEASURED_BYTES", 1)
    with offloading(model_folder) as ours:
        speed, poll = FAST, ours.rank.transfer.poll

        def timed_poll() -> list[Completion]:
            """Tell of loads as if the link had the speed of the moment."""
            return [
                replace(done, seconds=done.nbytes / speed)
                if done.direction is Direction.LOAD
                else done
                for done in poll()
            ]

        ours.rank.transfer.poll = timed_poll

        def serve() -> int:
            """Serve all prompts, one by one; return how many blocks were loaded for them."""
            ours.forget()
            assert ours.generate_each(PROMPTS) == expected
            return ours.blocks_loaded()

        serve()
        assert serve() == len(PROMPTS) * STORED_TOKENS // BLOCK_TOKENS
        assert ours.totals["recomputed_tokens"] == 0
        watch = ours.offload.watch
        assert watch.prefill_rate.tokens_per_second is not None
        assert watch.load_rate.measured_bytes_per_second is not None
        speed = SLOW
        for _ in range(6):
            serve()
            if ours.totals["recomputed_tokens"]:
                break  # most loads that are remembered were slow ones
        ours.slots[:] ^= 0x40  # what is computed does not care
        assert serve() == 0
        assert ours.totals["recomputed_tokens"] == len(PROMPTS) * STORED_TOKENS
