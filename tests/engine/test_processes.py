"""The engine core in a process of its own, and ranks in processes of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.multiprocess_run import check, run_engine


@pytest.mark.parametrize("ranks", [1, 2])
def test_round_trip_reset_and_sleep(model_folder: Path, forks: bool, ranks: int) -> None:
    arguments = {"tensor_parallel_size": ranks, "sleep": True}
    check(run_engine(model_folder, "qwen3", arguments, forks=forks), ranks)
