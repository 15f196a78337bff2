"""A link that is slower than computing has prompts computed, a faster one has them loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from kv_swap.host.runs import Run

from tests.engine.harness import BLOCK_TOKENS, Copies, engine, random_tokens

PROMPTS = [random_tokens(400 + index, seed=70 + index) for index in range(4)]
STORED_TOKENS = 400 // BLOCK_TOKENS * BLOCK_TOKENS
SLOW_SECONDS = 0.25
"""Of a load: several times what the engine needs to compute such a prompt."""


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
    control, slow = Copies(), [False]

    def copy_runs(runs: Sequence[Run]) -> None:
        if slow[0] and control.is_load(runs):
            time.sleep(SLOW_SECONDS)
        control.copy_runs(runs)

    monkeypatch.setattr("kv_swap.host.transfers.copy_runs", copy_runs)
    with engine(model_folder, plugin={}, synchronous_loads=synchronous) as offloading:

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
        slow[0] = True
        for _ in range(6):
            if not offloading.totals["recomputed_tokens"]:
                serve()  # until most loads that are remembered were slow ones
        offloading.slots[:] ^= 0x40  # what is computed does not care
        offloading.totals["recomputed_tokens"] = 0
        assert serve() == 0
        assert offloading.totals["recomputed_tokens"] == len(PROMPTS) * STORED_TOKENS
        offloading.assert_nothing_left()
