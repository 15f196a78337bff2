"""A real engine whose weights change: host memory serves nothing of the old ones.

Tokens are compared with an engine that had the new weights from the start. The control has the
plugin hear nothing of the change, and must give other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kv_offload.scheduler.contents import Contents
from tests.engine.harness import (
    BLOCK_TOKENS,
    Engine,
    Tokens,
    offloading,
    plain_answers,
    random_tokens,
)
from tests.engine.weight_updates import WAYS, Way, Weights, by_hand, write_new_weights

PROMPT = random_tokens(10 * BLOCK_TOKENS + 1, seed=11)
all_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Case(NamedTuple):
    weights: Weights
    old: list[Tokens]
    new: list[Tokens]


@pytest.fixture(scope="module")
def case(model_folder: Path) -> Case:
    """The new weights, and what engines without the plugin answer with the old and with these."""
    folder, weights = write_new_weights(model_folder)
    old, new = (plain_answers(models, [PROMPT]) for models in (model_folder, folder.parent))
    assert old != new
    return Case(weights, old, new)


@pytest.fixture
def ours(model_folder: Path, case: Case) -> Iterator[Engine]:
    """An engine with the old weights that has served the prompt from host memory."""
    extension = "tests.engine.weight_updates.UpdateNamedParam"
    with offloading(model_folder, worker_extension_cls=extension) as running:
        assert running.generate([PROMPT]) == case.old
        assert running.reload([PROMPT]) == case.old
        assert running.blocks_loaded() == 10
        running.forget()
        yield running


@all_ways
def test_nothing_of_the_old_weights_is_served(ours: Engine, case: Case, way: Way) -> None:
    """Also of what was stored between the change and the reset, from the engine's own cache."""
    ours.generate([PROMPT])
    way(ours, case.weights)
    ours.generate([PROMPT])
    ours.forget()
    # Computed at first, then stored and loaded like any other prompt.
    assert ours.generate([PROMPT]) == case.new
    assert ours.blocks_loaded() == 0
    for _ in range(2):
        assert ours.reload([PROMPT]) == case.new
        assert ours.blocks_loaded() == 10


@all_ways
def test_weights_that_change_after_the_reset_count_too(ours: Engine, case: Case, way: Way) -> None:
    way(ours, case.weights)
    assert ours.generate([PROMPT]) == case.new
    assert ours.blocks_loaded() == 0


@all_ways
def test_the_control_serves_old_kv(
    ours: Engine, case: Case, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contents, "weights_change", lambda contents: False)
    way(ours, case.weights)
    assert ours.reload([PROMPT]) != case.new
    assert ours.blocks_loaded() == 10


def test_a_report_says_that_the_model_was_given_weights(
    ours: Engine, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no rank lives beside the scheduler: what was stored before is gone a step later."""
    monkeypatch.setattr(ours.scheduler.connector, "_local_rank", lambda: None)
    assert ours.offload.manager.slots_in_use >= 10
    by_hand(ours, case.weights)
    ours.generate([random_tokens(3, seed=1)], max_tokens=1)
    assert ours.offload.manager.slots_in_use == 0
