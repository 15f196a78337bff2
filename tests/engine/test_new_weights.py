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
from tests.engine.harness import BLOCK_TOKENS, Engine, Tokens, engine, random_tokens
from tests.engine.weight_updates import WAYS, Weights, by_hand, write_new_weights

PROMPT = random_tokens(10 * BLOCK_TOKENS + 1, seed=11)


class Case(NamedTuple):
    weights: Weights
    old: list[Tokens]
    new: list[Tokens]


@pytest.fixture(scope="module")
def case(model_folder: Path) -> Case:
    """The new weights, and what engines without the plugin answer with the old and with these."""
    folder, weights = write_new_weights(model_folder)
    answers = []
    for models in (model_folder, folder.parent):
        with engine(models) as plain:
            answers.append(plain.generate([PROMPT]))
    assert answers[0] != answers[1]
    return Case(weights, *answers)


@pytest.fixture
def offloading(model_folder: Path, case: Case) -> Iterator[Engine]:
    """An engine with the old weights that has served the prompt from host memory."""
    with engine(
        model_folder,
        plugin={},
        worker_extension_cls="tests.engine.weight_updates.UpdateNamedParam",
    ) as running:
        assert running.generate([PROMPT]) == case.old
        running.reset_gpu_cache()
        assert running.generate([PROMPT]) == case.old
        assert running.blocks_loaded() == 10
        running.reset_gpu_cache()
        yield running


def assert_new_weights_are_served(offloading: Engine, case: Case) -> None:
    """Computed at first, then stored and loaded like any other prompt."""
    offloading.totals.clear()
    assert offloading.generate([PROMPT]) == case.new
    assert offloading.blocks_loaded() == 0
    for _ in range(2):
        offloading.reset_gpu_cache()
        offloading.totals.clear()
        assert offloading.generate([PROMPT]) == case.new
        assert offloading.blocks_loaded() == 10
    offloading.assert_nothing_left()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_of_the_old_weights_is_served(offloading: Engine, case: Case, way: object) -> None:
    """Also of what was stored between the change and the reset, from the engine's own cache."""
    offloading.generate([PROMPT])
    way(offloading, case.weights)
    offloading.generate([PROMPT])
    offloading.reset_gpu_cache()
    assert_new_weights_are_served(offloading, case)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_weights_that_change_after_the_reset_count_too(
    offloading: Engine, case: Case, way: object
) -> None:
    way(offloading, case.weights)
    offloading.totals.clear()
    assert offloading.generate([PROMPT]) == case.new
    assert offloading.blocks_loaded() == 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_control_serves_old_kv(
    offloading: Engine, case: Case, way: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contents, "weights_change", lambda contents: False)
    way(offloading, case.weights)
    offloading.reset_gpu_cache()
    offloading.totals.clear()
    assert offloading.generate([PROMPT]) != case.new
    assert offloading.blocks_loaded() == 10


def test_a_report_says_that_the_model_was_given_weights(
    offloading: Engine, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no rank lives beside the scheduler: what was stored before is gone a step later."""
    monkeypatch.setattr(offloading.scheduler.connector, "_local_rank", lambda: None)
    assert offloading.offload.manager.slots_in_use >= 10
    by_hand(offloading, case.weights)
    offloading.generate([random_tokens(3, seed=1)], max_tokens=1)
    assert offloading.offload.manager.slots_in_use == 0
