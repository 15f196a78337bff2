"""What the demo prints and returns, without an engine; `make demo` runs it with one."""

from __future__ import annotations

import pytest

from bench.demo import table, verdict
from bench.demo_engine import (
    COMPUTED,
    FROM_DISK,
    FROM_HOST_MEMORY,
    FROM_PREFIX_CACHE,
    FROM_STORE,
    Phase,
    make_prompts,
)

ANSWERS = [[1, 2], [3, 4]]
LOADED = {"lookup_tokens": 200, "hit_tokens": 150, "stored_bytes": 0, "loaded_bytes": 1_500_000}


CACHED = 250


def phase(source: str, answers: list[list[int]] = ANSWERS, **moved: int) -> Phase:
    cached = 0 if source == COMPUTED else CACHED
    return Phase("an engine", source, answers, 300, cached, [0.010, 0.030], moved)


BASE = [phase(COMPUTED), phase(FROM_PREFIX_CACHE)]


def test_the_table_shows_every_figure_of_a_phase():
    (line,) = (
        line for line in table([phase(FROM_HOST_MEMORY, **LOADED)]).splitlines() if "engine" in line
    )
    shown = line.replace(f"an engine, {FROM_HOST_MEMORY}", "").split("  ")
    figures = [cell.strip() for cell in shown if cell.strip()]
    expected = ["2", "300", "50", "100", "150", "0.00 MB", "1.50 MB", "75.0%", "20 ms", "10 ms"]
    assert figures == expected


@pytest.mark.parametrize(
    ("again", "status", "said"),
    [
        (phase(FROM_HOST_MEMORY, **LOADED), 0, "identical"),
        (phase(FROM_HOST_MEMORY, [[1, 2], [3, 5]], **LOADED), 1, "DIFFERENT"),
        (phase(FROM_HOST_MEMORY, **LOADED | {"hit_tokens": 0}), 1, "NOTHING was loaded"),
        (phase(FROM_HOST_MEMORY, **LOADED | {"loaded_bytes": 0}), 1, "NOTHING was loaded"),
    ],
)
def test_the_verdict_is_good_only_for_equal_tokens_that_were_loaded(again, status, said):
    found, line = verdict(BASE, [phase(COMPUTED, **LOADED), again])
    assert found == status
    assert said in line


@pytest.mark.parametrize("source", [FROM_DISK, FROM_STORE])
@pytest.mark.parametrize(("promoted", "status"), [(7, 0), (0, 1)])
def test_what_comes_from_a_tier_must_have_been_read_from_it(source, promoted, status):
    moved = LOADED | {"promoted_slots": promoted}
    found, line = verdict(BASE, [phase(COMPUTED, **LOADED), phase(source, **moved)])
    assert found == status
    assert (f"NOTHING was read {source}" in line) == bool(status)


def test_what_an_engine_with_a_store_has_computed_is_compared_with_what_was_computed():
    other = [[1, 2], [3, 5]]
    base = [BASE[0], phase(FROM_PREFIX_CACHE, other)]
    found, _ = verdict(base, [phase(COMPUTED, **LOADED)])
    assert found == 0
    found, _ = verdict(base, [phase(COMPUTED, other, **LOADED)])
    assert found == 1


def test_prompts_of_a_group_share_a_prefix_and_are_the_same_in_every_run():
    prompts = make_prompts()
    assert prompts == make_prompts()
    shared = [sum(a == b for a, b in zip(prompts[0], other, strict=False)) for other in prompts]
    assert shared[0] > shared[1] >= 1024
    assert max(shared[3:]) < 100
