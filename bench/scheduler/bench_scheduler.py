"""Host time of the connector on the engine's scheduling thread, with vLLM's own scheduler.

Run with `pytest -s bench/scheduler/bench_scheduler.py --benchmark-enable`: 256 requests decode with
a full host cache of 1,000,000 slots. Only time inside the connector's hooks counts and is printed
(`bench/hook_clock.py`); pytest-benchmark itself shows the time of the whole step. With
`KV_OFFLOAD_BENCH_RESULTS` set to a folder, `scheduler.json` is written there. Without the option,
everything runs at a small size.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from bench.machine import keep_rows
from bench.scheduler.bed import BLOCK_TOKENS, SchedulerBed, StepCost

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

PROMPTS = [1024, 8192, 32768, 131072]
MAX_GROWTH = 2.0
"""Allowed ratio of a step's cost with the longest running prompts to that with the shortest.

The work is the same, but long block tables are less likely to be in the CPU's caches. Work that
grew with the prompt would be 8 times as much at the small size, and 128 times at the large one."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The size of a run: full, or small to test only the code."""

    running: int
    slots: int
    steps: int
    requests: int
    longest: int


FULL = Size(running=256, slots=1_000_000, steps=480, requests=8, longest=PROMPTS[-1])
TRIAL = Size(running=16, slots=4096, steps=64, requests=1, longest=8192)

GetBed = Callable[[int], SchedulerBed]


@pytest.fixture(scope="module")
def size(request: pytest.FixtureRequest) -> Size:
    options = request.config.option
    return FULL if options.benchmark_enable or not options.benchmark_disable else TRIAL


@pytest.fixture(autouse=True)
def _only_prompts_of_the_size(request: pytest.FixtureRequest, size: Size) -> None:
    callspec = getattr(request.node, "callspec", None)
    prompt_tokens = callspec.params.get("prompt_tokens", 0) if callspec else 0
    if prompt_tokens > size.longest:
        pytest.skip(f"prompts of {prompt_tokens} tokens; add --benchmark-enable")


@pytest.fixture(scope="module")
def get_bed(size: Size) -> Iterator[GetBed]:
    """Yield a function that returns the bed with running prompts of a given length."""
    beds: dict[int, SchedulerBed] = {}

    def get(prompt_tokens: int) -> SchedulerBed:
        if prompt_tokens not in beds:
            beds[prompt_tokens] = SchedulerBed(
                size.running, prompt_tokens, size.slots, size.longest
            )
            gc.collect()
            gc.freeze()  # as vLLM's engine core does after its start
        return beds[prompt_tokens]

    yield get
    gc.unfreeze()


@pytest.fixture(scope="module")
def rows(size: Size) -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    if size is FULL:
        for row in rows:
            print(", ".join(f"{name}: {value}" for name, value in row.items()))
        keep_rows("scheduler.json", rows, running=size.running, slots=size.slots)


def microseconds(costs: Sequence[StepCost]) -> list[float]:
    return [cost.seconds * 1e6 for cost in costs]


def median_of_a_block(costs: Sequence[StepCost]) -> float:
    """Return the microseconds of a step in the median round in which all requests fill a block."""
    times = microseconds(costs)
    starts = range(0, len(times), BLOCK_TOKENS)
    return statistics.median(statistics.mean(times[at : at + BLOCK_TOKENS]) for at in starts)


def by_hook(costs: Sequence[StepCost], per: int) -> dict[str, float]:
    """Return the microseconds of the most expensive hooks."""
    total: Counter[str] = Counter()
    for cost in costs:
        total.update(cost.by_hook)
    return {name: round(value / per * 1e6, 1) for name, value in total.most_common(6)}


def row_of_steps(name: str, prompt_tokens: int, costs: Sequence[StepCost]) -> Row:
    times = microseconds(costs)
    p10, p50, p99 = (round(float(np.percentile(times, share)), 1) for share in (10, 50, 99))
    return {
        "name": name,
        "prompt_tokens": prompt_tokens,
        "min_us": round(min(times), 1),
        "p10_us": p10,
        "p50_us": p50,
        "p99_us": p99,
        "mean_us": round(statistics.mean(times), 1),
        "by_hook_us": by_hook(costs, len(costs)),
    }


@pytest.mark.parametrize("prompt_tokens", PROMPTS)
def test_step_of_decodes(
    benchmark: Any, get_bed: GetBed, rows: list[Row], size: Size, prompt_tokens: int
) -> None:
    """Measure a step in which all requests decode and a sixteenth of them complete a block."""
    bed = get_bed(prompt_tokens)
    costs: list[StepCost] = []
    benchmark.pedantic(lambda: costs.append(bed.step()), rounds=size.steps)
    while len(costs) < size.steps:  # without --benchmark-enable, there is one round
        costs.append(bed.step())
    rows.append(row_of_steps("step of decodes", prompt_tokens, costs))
    running = len(bed.scheduler.running)
    assert all(cost.scheduled_tokens == running for cost in costs), "another request was scheduled"
    stored = sum(cost.stored_blocks for cost in costs)
    expected = len(costs) * running // BLOCK_TOKENS
    assert stored == pytest.approx(expected, rel=1 / 16), "the prompts were not stored beforehand"


def test_step_by_policy(rows: list[Row], size: Size) -> None:
    """Compare LRU and `auto` in turns: decodes alone, and next to repeated and new prompts."""
    beds = {
        policy: SchedulerBed(
            size.running, PROMPTS[0], size.slots, size.longest, {"eviction_policy": policy}
        )
        for policy in ("lru", "auto")
    }
    costs: dict[str, list[StepCost]] = {}
    for turn in range(size.steps // BLOCK_TOKENS):
        for policy, bed in beds.items():
            decodes = [bed.step() for _ in range(BLOCK_TOKENS)]
            costs.setdefault(f"step of decodes, {policy}", []).extend(decodes)
            for what in ("hit", "new prompt"):
                prefix = bed.take_stored_prefix() if what == "hit" else bed.new_prefix()
                served = bed.serve(f"{what}-{turn}", prefix, PROMPTS[1])
                costs.setdefault(f"step beside a {what}, {policy}", []).extend(served)
    rows += [row_of_steps(name, PROMPTS[0], of) for name, of in costs.items()]
    for bed in beds.values():
        bed.connector.shutdown()


@pytest.mark.parametrize("prompt_tokens", PROMPTS[1:])
@pytest.mark.parametrize("found", ["hit", "miss"])
def test_new_request(
    benchmark: Any, get_bed: GetBed, rows: list[Row], size: Size, found: str, prompt_tokens: int
) -> None:
    """Measure all steps of a prompt that is or is not in host memory, minus the cost of decodes.

    Only `by_hook_us` includes the cost of the decodes in these steps.
    """
    bed = get_bed(PROMPTS[0])
    served: list[list[StepCost]] = []

    def draw() -> tuple[tuple[int], dict[str, Any]]:
        return (bed.take_stored_prefix() if found == "hit" else bed.new_prefix(),), {}

    benchmark.pedantic(
        lambda prefix: served.append(bed.serve(f"new-{prefix}", prefix, prompt_tokens)),
        setup=draw,
        rounds=size.requests,
    )
    base = statistics.median(microseconds([bed.step() for _ in range(2 * BLOCK_TOKENS)]))
    totals = [sum(microseconds(costs)) - base * len(costs) for costs in served]
    largest = [max(microseconds(costs)) - base for costs in served]
    rows.append(
        {
            "name": f"new request, {found}",
            "prompt_tokens": prompt_tokens,
            "steps": statistics.median(len(costs) for costs in served),
            "total_us": round(statistics.median(totals), 1),
            "largest_step_us": round(statistics.median(largest), 1),
            "by_hook_us": by_hook([cost for costs in served for cost in costs], len(served)),
        }
    )
    loaded = [sum(cost.loaded_blocks for cost in costs) for costs in served]
    expected = prompt_tokens // BLOCK_TOKENS if found == "hit" else 0
    assert loaded == [expected] * len(served)


@pytest.mark.parametrize("prompt_tokens", PROMPTS[1:])
def test_hit_that_waits(
    benchmark: Any, get_bed: GetBed, rows: list[Row], size: Size, prompt_tokens: int
) -> None:
    """Measure decodes next to a prompt that is in host memory but lacks free GPU blocks.

    vLLM looks it up in every step.
    """
    bed = get_bed(PROMPTS[0])
    costs: list[StepCost] = []
    with bed.waiting_hit("waiting", prompt_tokens) as make_up:
        benchmark.pedantic(lambda: costs.append(bed.step()), setup=make_up, rounds=size.steps)
    rows.append(row_of_steps("step beside a hit that waits", prompt_tokens, costs))
    assert all(cost.by_hook["get_num_new_matched_tokens"] > 0 for cost in costs)
    assert not any(cost.loaded_blocks for cost in costs), "it did not wait"


def test_cost_does_not_grow_with_prompts(get_bed: GetBed, size: Size) -> None:
    costs: dict[int, list[StepCost]] = {PROMPTS[0]: [], size.longest: []}
    for _ in range(max(256, size.steps)):  # in turns, so that both meet the same conditions
        for prompt_tokens, times in costs.items():
            times.append(get_bed(prompt_tokens).step())
    at_short, at_long = (median_of_a_block(times) for times in costs.values())
    assert at_long <= MAX_GROWTH * at_short, (
        f"a step costs {at_long:.0f} us beside prompts of {size.longest} tokens and "
        f"{at_short:.0f} us beside prompts of {PROMPTS[0]}: {at_long / at_short:.1f} times as much"
    )
