"""The soak on a GPU: `SOAK_SECONDS`, 20 minutes by default, over runners and scheduling modes.

Each case takes a quarter of it, so `pytest tests/gpu/test_soak.py -k V2` runs half.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.support.processes import run_module

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))
SEED = os.environ.get("SOAK_SEED", str(random.randrange(1 << 31)))
"""Printed by the run; set `SOAK_SEED` to replay it."""
TOLERANCE = 0.3
"""In nats. If a bfloat16 model prefers a token by less, the shape of the batch may decide."""


@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(SECONDS / 4 + 300)
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1", "V2"])
def test_every_loaded_block_is_the_one_that_was_stored(tmp_path, runner, async_scheduling):
    from tests.engine.soak import check

    arguments = {
        "kind": "llama_wide",  # a smaller model's pool in bfloat16 has less than 1 MiB
        "tolerance": TOLERANCE,
        "dtype": "bfloat16",
        "enforce_eager": False,
        "async_scheduling": async_scheduling,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.1,
    }
    print(f"seed {SEED}")
    result = run_module(
        "tests.engine.soak",
        tmp_path,
        str(SECONDS / 4),
        SEED,
        arguments,
        timeout_seconds=SECONDS / 4 + 280,
        VLLM_USE_V2_MODEL_RUNNER=runner,
    )
    print(result)
    check(result, least_same=0.5)
    assert result["asynchronous"] == async_scheduling
