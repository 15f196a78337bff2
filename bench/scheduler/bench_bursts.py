"""CPU time of vLLM's `schedule()` when many requests with prefixes to load arrive at once.

Run with `pytest -s bench/scheduler/bench_bursts.py --benchmark-enable`. With
`KV_OFFLOAD_BENCH_RESULTS` set to a folder, `bursts.json` is written there. Without the option, each
case runs once with few requests.

No copy ends, so the requests wait while 8 others decode. The same burst goes to vLLM without a
connector, and with one that always answers "ask again". This shows vLLM's own share of the time: it
goes through all waiting requests in each step.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from bench.machine import keep_rows
from bench.scheduler.burst_bed import BurstBed, Where, full_store

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

REQUESTS = [100, 1000, 5000]
EQUAL_BLOCKS, DIFFERENT_BLOCKS = 400, 64
STEPS = 5

Row = dict[str, Any]


@pytest.fixture(scope="module")
def is_full(request: pytest.FixtureRequest) -> bool:
    options = request.config.option
    return bool(options.benchmark_enable or not options.benchmark_disable)


@pytest.fixture(scope="module")
def rows(is_full: bool) -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    if is_full:
        for row in rows:
            print(", ".join(f"{name}: {value}" for name, value in row.items()))
        keep_rows("bursts.json", rows, equal_blocks=EQUAL_BLOCKS, different_blocks=DIFFERENT_BLOCKS)


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("prefixes", ["equal", "different"])
@pytest.mark.parametrize("where", get_args(Where))
def test_burst(
    benchmark: Any,
    rows: list[Row],
    is_full: bool,
    tmp_path: Path,
    where: Where,
    prefixes: str,
    requests: int,
) -> None:
    """Measure the step in which the requests arrive, and the steps in which they wait."""
    if not is_full and requests > REQUESTS[0]:
        pytest.skip(f"{requests} requests; add --benchmark-enable")
    equal = prefixes == "equal"
    with full_store():
        bed = BurstBed(
            where, requests, EQUAL_BLOCKS if equal else DIFFERENT_BLOCKS, tmp_path, equal
        )
    bed.burst(requests)
    gc.collect()
    gc.freeze()  # as vLLM's engine core does after its start
    seconds: list[float] = []
    benchmark.pedantic(lambda: seconds.append(bed.step()), rounds=1 + STEPS)
    while len(seconds) <= STEPS:  # without --benchmark-enable, there is one round
        seconds.append(bed.step())
    gc.unfreeze()
    first, *others = (round(1e3 * one, 2) for one in seconds)
    rows.append(
        {
            "where": where,
            "prefixes": prefixes,
            "requests": requests,
            "first_step_ms": first,
            "p50_step_ms": round(statistics.median(others), 2),
            "max_step_ms": max(others),
        }
    )
    assert where == "vLLM alone" or bed.waiting > 0, "all of them were admitted"
    bed.close()
