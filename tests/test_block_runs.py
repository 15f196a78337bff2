from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from bench.block_runs import Traffic, grow_old, in_runs


def test_blocks_count_as_in_runs_from_16_on() -> None:
    ids = np.concatenate([np.arange(16), 100 + np.arange(15), np.arange(40, 30, -1)])
    assert in_runs(ids) == 16 / 41


def test_prompts_get_neighbours_from_a_young_engine_and_not_from_an_old_one() -> None:
    found = np.array(grow_old(Traffic(4000, 16, 1000, 100), 2000))
    young, old = (np.average(part[:, 0], weights=part[:, 2]) for part in (found[:16], found[-200:]))
    assert young > 0.9
    assert old < 0.3
    assert (found[:, 1] <= found[:, 0]).all(), "runs in order are runs"
