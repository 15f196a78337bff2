"""What the demo prints and returns, without an engine; `make demo` runs it with one."""

from __future__ import annotations

import pytest

from bench.demo import HEADER, Phase, make_prompts, table, verdict

ANSWERS = [[1, 2], [3, 4]]
LOADED = {"lookup_tokens": 200, "hit_tokens": 150, "stored_bytes": 0, "loaded_bytes": 1_500_000}


def phase(answers: list[list[int]] = ANSWERS, cached: int = 0, **moved: int) -> Phase:
    return Phase("with the plugin", answers, 300, cached, [0.010, 0.030], moved)


def test_the_table_shows_every_figure_of_a_phase() -> None:
    *_, line = table([phase(cached=250, **LOADED)]).splitlines()
    shown = line.replace("with the plugin", "").split("  ")
    figures = [cell.strip() for cell in shown if cell.strip()]
    expected = ["2", "300", "50", "100", "150", "0.00 MB", "1.50 MB", "75.0%", "20 ms"]
    assert figures == expected
    assert len(HEADER) == len(expected) + 1


@pytest.mark.parametrize(
    ("again", "status", "said"),
    [
        (phase(cached=250, **LOADED), 0, "identical"),
        (phase([[1, 2], [3, 5]], 250, **LOADED), 1, "DIFFERENT"),
        (phase(cached=250, **LOADED | {"hit_tokens": 0}), 1, "NOTHING was loaded"),
        (phase(cached=250, **LOADED | {"loaded_bytes": 0}), 1, "NOTHING was loaded"),
    ],
)
def test_the_verdict_is_good_only_for_equal_tokens_that_were_loaded(
    again: Phase, status: int, said: str
) -> None:
    found, line = verdict([phase(), phase(cached=250)], [phase(**LOADED), again])
    assert found == status
    assert said in line


def test_prompts_of_a_group_share_a_prefix_and_are_the_same_in_every_run() -> None:
    prompts = make_prompts()
    assert prompts == make_prompts()
    shared = [sum(a == b for a, b in zip(prompts[0], other, strict=False)) for other in prompts]
    assert shared[0] > shared[1] >= 1024
    assert max(shared[3:]) < 100
