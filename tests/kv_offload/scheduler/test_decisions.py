"""How a hit is served, as tables of what it costs."""

from __future__ import annotations

import pytest

from kv_offload.scheduler.loads.decision import (
    BUSY_SECONDS,
    BUSY_SHARE,
    IDLE_SECONDS,
    MARGIN,
    MAX_COMPUTE_RATIO,
    WAVES_SHARE,
    WHOLE_SECONDS,
    Costs,
    Decision,
    is_computed,
    is_synchronous,
    loaded_part,
)

MORE, LESS = 1.001, 0.999
FORWARD = 0.1
HIDDEN_BY_FORWARD = (FORWARD * BUSY_SHARE + BUSY_SECONDS) / (1 - WAVES_SHARE)


@pytest.mark.parametrize(
    ("costs", "synchronous"),
    [
        (Costs(BUSY_SECONDS), True),
        (Costs(BUSY_SECONDS * MORE), False),
        (Costs(BUSY_SECONDS, queued=1.0), True),
        (Costs(BUSY_SECONDS, queued=1.0, beside=1e-6), False),
        (Costs(IDLE_SECONDS, idle=True), True),
        (Costs(IDLE_SECONDS * MORE, idle=True), False),
        (Costs(0.2, hidden=0.2), True),
        (Costs(0.2, hidden=0.2, queued=BUSY_SECONDS * MORE), False),
        (Costs(HIDDEN_BY_FORWARD * LESS, forward=FORWARD), True),
        (Costs(HIDDEN_BY_FORWARD * MORE, forward=FORWARD), False),
    ],
)
def test_a_load_is_synchronous_if_it_delays_its_step_by_little(costs, synchronous):
    assert is_synchronous(costs) == synchronous


@pytest.mark.parametrize(
    ("costs", "synchronous", "computed"),
    [
        (Costs(1.0), True, None),
        (Costs(1.0, queued=9.0, compute=MAX_COMPUTE_RATIO * MORE), True, None),
        (Costs(1.0, queued=9.0, compute=MAX_COMPUTE_RATIO * LESS), True, True),
        (Costs(1.0, compute=LESS / MARGIN), True, True),
        (Costs(1.0, compute=MORE / MARGIN), True, False),
        (Costs(1.0, compute=MORE / MARGIN, step=0.1), False, True),
        (Costs(1.0, compute=MORE / MARGIN, step=0.1), True, False),
        (Costs(1.0, compute=LESS / MARGIN, ahead=0.1), True, False),
        (Costs(1.0, compute=LESS, prefers_compute=True), True, True),
        (Costs(1.0, compute=MORE, prefers_compute=True), True, False),
    ],
)
def test_a_hit_is_computed_if_that_is_clearly_faster(costs, synchronous, computed):
    assert is_computed(costs, synchronous=synchronous) is computed


SHORT, LONG = Costs(WHOLE_SECONDS, idle=True), Costs(WHOLE_SECONDS * MORE, idle=True)


@pytest.mark.parametrize(
    ("end", "costs", "synchronous", "part"),
    [
        (16, SHORT, True, Decision(8, 16, True)),
        (20, SHORT, False, Decision(12, 20, False)),
        (20, SHORT, True, Decision(11, 20, True)),
        (20, LONG, True, Decision(8, 16, True)),
        (20, Costs(1.0), True, Decision(11, 20, True)),
        (20, Costs(0.0, decode=WHOLE_SECONDS * MORE, idle=True), True, Decision(8, 16, True)),
    ],
)
def test_the_engine_computes_a_token_of_a_request_that_is_loaded_at_once(
    end, costs, synchronous, part
):
    assert loaded_part(8, end, 20, 4, costs, synchronous=synchronous) == part
