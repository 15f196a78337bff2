"""A reset of a played engine with a disk is answered once no restart can undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.cache.disk_index import index
from kv_offload.tiers import disk
from tests.support.manual_tier import ManualTier
from tests.support.played_cases import PROMPT
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.engine

PROBLEM = "cannot write rank-0.kv: a bad disk"
Make = Callable[..., PlayedEngine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds an engine whose disk has a prompt, and shuts it down in the end."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(index, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr("kv_offload.engines.vllm.patches.reset_prefix_cache.SETTLE_SECONDS", 0.2)
    made: list[PlayedEngine] = []

    def build(**plugin: Any) -> PlayedEngine:
        plugin = {"disk": {"path": str(tmp_path), "bytes": "1MiB", **plugin}}
        made.append(engine := PlayedEngine(plugin=plugin))
        engine.serve("first", PROMPT, 1)
        assert engine.offload.gauges()["tier_slots_in_use"] == 5
        return engine

    yield build
    for engine in made:
        engine.connector.shutdown()


def tier_of(engine: PlayedEngine) -> ManualTier:
    tier = engine.ranks[0].tier
    assert tier is not None
    return tier


@pytest.fixture
def bad_index(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """An index that can neither be removed nor emptied, until what this returns is called."""
    end_index, mended = index.end_index, list[bool]()

    def fail(*arguments: Any) -> None:
        if not mended:
            raise OSError(5, "a bad disk")
        end_index(*arguments)

    monkeypatch.setattr(index, "end_index", fail)
    return lambda: mended.append(True)


def test_a_reset_is_answered_once_the_index_or_a_rank_has_ended_what_was_there(make, tmp_path):
    engine = make()
    assert (tmp_path / "index.sqlite").exists()
    tier_of(engine).revoke_problem = PROBLEM
    assert engine.reset(reset_connector=True)
    assert not (tmp_path / "index.sqlite").exists()
    assert engine.reset(reset_connector=True)
    assert tier_of(engine).happened["revoked"] == 1, "the index has ended: nothing can come back"


def test_a_rank_is_enough(make, bad_index):
    engine = make()
    assert engine.reset(reset_connector=True)
    assert tier_of(engine).happened["revoked"] == 1


def test_a_reset_that_might_be_undone_is_answered_with_false_and_the_remedy(
    make, bad_index, tmp_path, caplog
):
    engine = make()
    tier_of(engine).revoke_problem = PROBLEM
    for _ in range(2):
        assert not engine.reset(reset_connector=True)
        assert not engine.reset(), "nor is the next one, which does not name the connector"
    (told,) = [r.message for r in caplog.records if r.name == disk.__name__ and r.levelno > 30]
    assert f"{tmp_path / 'index.sqlite'} cannot be removed or emptied: [Errno 5] a bad" in told
    assert PROBLEM in told
    assert "Remove its folder before the next start, or repair the disk and call" in told
    # This process serves nothing of before, and stores as ever.
    assert engine.offload.gauges()["tier_slots_in_use"] == 0
    engine.serve("again", PROMPT, 1)
    assert engine.totals["hit_tokens"] == 0
    bad_index()
    engine.offload.tiers.tiers["disk"].index.wait_ended(20)
    assert engine.reset()
    assert "the disk has been emptied for a restart, too" in caplog.text


def test_the_end_of_an_engine_says_once_more_what_its_disk_may_serve(make, bad_index, caplog):
    engine = make()
    tier_of(engine).revoke_problem = PROBLEM
    assert not engine.reset(reset_connector=True)
    caplog.clear()
    engine.connector.shutdown()
    assert "the disk could not be emptied for a restart: " in caplog.text


@pytest.mark.parametrize("plugin", [{"keep_on_restart": False}, {"keep_on_reset": True}])
def test_where_no_restart_can_undo_it_or_should_nothing_is_waited_for(make, bad_index, plugin):
    engine = make(**plugin)
    tier_of(engine).revoke_problem = PROBLEM
    assert engine.reset(reset_connector=True)
    assert tier_of(engine).happened["revoked"] == 0


@pytest.mark.parametrize("plugin", [{}, {"keep_on_reset": True}])
def test_before_weights_change_the_disk_has_ended_what_was_there(make, monkeypatch, plugin):
    engine = make(**plugin)
    seen: list[int] = []
    change = engine.change_weights
    revoked = tier_of(engine).happened
    monkeypatch.setattr(
        engine, "change_weights", lambda: seen.append(revoked["revoked"]) or change()
    )
    for _ in range(3):
        engine.core.collective_rpc("update_named_param")
    assert seen == [1, 1, 1]
    assert engine.reset()


def test_a_trainer_does_not_wait_for_a_dead_disk_with_each_tensor(make, bad_index):
    engine = make()
    tier_of(engine).revoke_problem = PROBLEM
    for _ in range(5):
        engine.core.collective_rpc("update_named_param")
    assert tier_of(engine).happened["revoked"] == 1
    assert not engine.reset()
    assert tier_of(engine).happened["revoked"] == 2


def test_weights_that_a_rank_tells_of_in_a_step_are_not_waited_for_and_the_log_says_so(
    make, bad_index, caplog
):
    engine = make()
    engine.offload.resets.weights_were_loaded({0: 1})
    assert not engine.offload.tiers.is_settled
    assert engine.offload.tiers.tiers["disk"].index.wait_ended(0.2) is False
    engine.serve("next", PROMPT, 1)
    assert "the disk could not be emptied for a restart: " in caplog.text
    assert engine.reset(), "which asks the ranks"
