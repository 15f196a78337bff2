"""Host time that the connector takes of the engine's scheduling thread, on vLLM's own scheduler.

Run with `pytest -s bench/bench_scheduler.py --benchmark-enable`: 256 requests decode beside a full
host cache of 1,000,000 slots. Only time inside the connector's hooks counts (`serving_clock`); it
is printed, and in `extra_info`: what pytest-benchmark itself shows is the time of the whole step.
With `KV_OFFLOAD_BENCH_RESULTS` set to a directory, `scheduler.json` is written there. Without the
option everything runs once, at a small size.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from bench.bench_swap import RESULTS_VARIABLE
from bench.scheduler_bed import BLOCK_TOKENS, SchedulerBed, StepCost
from bench.swap_rows import machine, vllm_module

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

RUNNING, SLOTS = 256, 1_000_000
RUNNING_AS_TEST, SLOTS_AS_TEST = 16, 4096
STEPS, STEPS_AS_TEST = 480, 64
REQUESTS = 8
PROMPTS = [1024, 8192, 32768, 131072]
LONGEST_AS_TEST = 8192
MAX_GROWTH = 2.0
"""Allowed ratio of a step's cost at the longest running prompts to that at the shortest.

The work is the same, but long block tables live farther from the CPU. Work that grew with the
prompt would be 8 times as much at the small size, and 128 times at the large one."""

Row = dict[str, Any]


def microseconds(costs: Sequence[StepCost]) -> list[float]:
    return [cost.seconds * 1e6 for cost in costs]


def by_hook(costs: Sequence[StepCost], per: int) -> dict[str, float]:
    total: Counter[str] = Counter()
    for cost in costs:
        total.update(cost.by_hook)
    return {name: round(value / per * 1e6, 1) for name, value in total.most_common(6)}


def row_of_steps(name: str, prompt_tokens: int, costs: Sequence[StepCost]) -> Row:
    times = microseconds(costs)
    return {
        "name": name,
        "prompt_tokens": prompt_tokens,
        "mean_us": round(statistics.mean(times), 1),
        "min_us": round(min(times), 1),
        "p10_us": round(float(np.percentile(times, 10)), 1),
        "p50_us": round(statistics.median(times), 1),
        "p99_us": round(float(np.percentile(times, 99)), 1),
        "by_hook_us": by_hook(costs, len(costs)),
    }


@pytest.fixture(scope="module")
def enabled(request: pytest.FixtureRequest) -> bool:
    options = request.config.option
    return bool(options.benchmark_enable or not options.benchmark_disable)


@pytest.fixture(scope="module")
def get_bed(enabled: bool) -> Iterator[Callable[[int], SchedulerBed]]:
    beds: dict[int, SchedulerBed] = {}

    def get(prompt_tokens: int) -> SchedulerBed:
        if prompt_tokens > LONGEST_AS_TEST and not enabled:
            pytest.skip(f"prompts of {prompt_tokens} tokens; add --benchmark-enable")
        if prompt_tokens not in beds:
            running, slots = (RUNNING, SLOTS) if enabled else (RUNNING_AS_TEST, SLOTS_AS_TEST)
            beds[prompt_tokens] = SchedulerBed(
                running, prompt_tokens, slots, PROMPTS[-1] if enabled else LONGEST_AS_TEST
            )
            gc.collect()
            gc.freeze()  # as vLLM's engine core does when it has started
        return beds[prompt_tokens]

    yield get
    gc.unfreeze()


@pytest.fixture(scope="module")
def rows(enabled: bool) -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    for row in rows if enabled else ():
        print(", ".join(f"{name}: {value}" for name, value in row.items()))
    directory = os.environ.get(RESULTS_VARIABLE)
    if directory and enabled:
        facts = machine() | {"vllm": vllm_module().__version__, "cpu": cpu_name()}
        # Of the last minutes: above 1, others took part of the time, and p10 says more than p50.
        facts["load_average"] = [round(load, 2) for load in os.getloadavg()]
        document = {"machine": facts, "running": RUNNING, "slots": SLOTS, "rows": rows}
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "scheduler.json").write_text(json.dumps(document, indent=1) + "\n")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


@pytest.mark.parametrize("prompt_tokens", PROMPTS)
def test_step_of_decodes(
    benchmark: Any,
    get_bed: Callable[[int], SchedulerBed],
    rows: list[Row],
    enabled: bool,
    prompt_tokens: int,
) -> None:
    """A step in which all requests decode and a sixteenth of them complete a block."""
    bed = get_bed(prompt_tokens)
    costs: list[StepCost] = []
    benchmark.pedantic(lambda: costs.append(bed.step()), rounds=STEPS if enabled else STEPS_AS_TEST)
    row = row_of_steps("step of decodes", prompt_tokens, costs)
    benchmark.extra_info.update(row)
    rows.append(row)
    running = len(bed.scheduler.running)
    assert all(cost.scheduled_tokens == running for cost in costs), "somebody else was scheduled"
    stored = sum(cost.stored_blocks for cost in costs)
    assert stored == len(costs) * running // BLOCK_TOKENS, "the prompts were not stored beforehand"


@pytest.mark.parametrize("prompt_tokens", PROMPTS[1:])
@pytest.mark.parametrize("found", ["hit", "miss"])
def test_new_request(
    benchmark: Any,
    get_bed: Callable[[int], SchedulerBed],
    rows: list[Row],
    enabled: bool,
    found: str,
    prompt_tokens: int,
) -> None:
    """All steps of a prompt that host memory has, or has not, beyond what decodes cost in them.

    Only `by_hook_us` includes what the decodes cost in these steps.
    """
    if prompt_tokens > LONGEST_AS_TEST and not enabled:
        pytest.skip(f"a prompt of {prompt_tokens} tokens; add --benchmark-enable")
    bed = get_bed(PROMPTS[0])
    served: list[list[StepCost]] = []

    def draw() -> tuple[tuple[int], dict[str, Any]]:
        return (bed.take_stored_prefix() if found == "hit" else bed.new_prefix(),), {}

    benchmark.pedantic(
        lambda prefix: served.append(bed.serve(f"new-{prefix}", prefix, prompt_tokens)),
        setup=draw,
        rounds=REQUESTS if enabled else 1,
    )
    base = statistics.median(microseconds([bed.step() for _ in range(2 * BLOCK_TOKENS)]))
    totals = [sum(microseconds(costs)) - base * len(costs) for costs in served]
    largest = [max(microseconds(costs)) - base for costs in served]
    row = {
        "name": f"new request, {found}",
        "prompt_tokens": prompt_tokens,
        "steps": statistics.median(len(costs) for costs in served),
        "total_us": round(statistics.median(totals), 1),
        "largest_step_us": round(statistics.median(largest), 1),
        "by_hook_us": by_hook([cost for costs in served for cost in costs], len(served)),
    }
    benchmark.extra_info.update(row)
    rows.append(row)
    loaded = [sum(cost.loaded_blocks for cost in costs) for costs in served]
    expected = prompt_tokens // BLOCK_TOKENS if found == "hit" else 0
    assert loaded == [expected] * len(served)


@pytest.mark.parametrize("prompt_tokens", PROMPTS[1:])
def test_hit_that_waits(
    benchmark: Any,
    get_bed: Callable[[int], SchedulerBed],
    rows: list[Row],
    enabled: bool,
    prompt_tokens: int,
) -> None:
    """A step of decodes beside a prompt that host memory has and for which no GPU blocks are free.

    vLLM asks for it in every step.
    """
    if prompt_tokens > LONGEST_AS_TEST and not enabled:
        pytest.skip(f"a prompt of {prompt_tokens} tokens; add --benchmark-enable")
    bed = get_bed(PROMPTS[0])
    costs: list[StepCost] = []
    with bed.waiting_hit("waiting", prompt_tokens) as make_up:
        benchmark.pedantic(
            lambda: costs.append(bed.step()),
            setup=make_up,
            rounds=STEPS if enabled else STEPS_AS_TEST,
        )
    row = row_of_steps("step beside a hit that waits", prompt_tokens, costs)
    benchmark.extra_info.update(row)
    rows.append(row)
    assert all(cost.by_hook["get_num_new_matched_tokens"] > 0 for cost in costs)
    assert not any(cost.loaded_blocks for cost in costs), "it did not wait"


def test_cost_does_not_grow_with_prompts(
    get_bed: Callable[[int], SchedulerBed], enabled: bool
) -> None:
    short, long = PROMPTS[0], PROMPTS[-1] if enabled else LONGEST_AS_TEST
    costs: dict[int, list[StepCost]] = {short: [], long: []}
    for _ in range(STEPS if enabled else 4 * STEPS_AS_TEST):  # by turns: both meet the same machine
        for prompt_tokens, times in costs.items():
            times.append(get_bed(prompt_tokens).step())
    at_short, at_long = (statistics.median(microseconds(times)) for times in costs.values())
    assert at_long <= MAX_GROWTH * at_short, (
        f"a step costs {at_long:.0f} us beside prompts of {long} tokens and {at_short:.0f} us "
        f"beside prompts of {short}: {at_long / at_short:.1f} times as much"
    )
