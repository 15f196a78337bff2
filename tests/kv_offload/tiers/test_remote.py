"""A store that engines share, as requests see it: what is asked, what is found, what is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kv_offload.cache.policies.auto import AutoPolicy
from kv_offload.tiers import base, directory, lower, remote
from kv_offload.tiers.remote import SHARED_GENERATION, RecentKeys
from tests.support.manual_tier import REMOTE, ManualDirectory, ManualRemote, manual_remote
from tests.support.played_cases import PROMPT
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.engine

OTHER = [0, *PROMPT[1:]]
FULL_BLOCKS = len(PROMPT) // 4


class RemoteEngine(PlayedEngine):
    """An engine with a store; two of them in one process share it."""

    def __init__(self, **more: Any) -> None:
        plugin = {**REMOTE, **more.pop("plugin", {})}
        super().__init__(plugin=plugin, **{"async_scheduling": True, **more})

    @property
    def store(self) -> ManualRemote:
        found = self.ranks[0].tier
        assert isinstance(found, ManualRemote)
        return found

    @property
    def directory(self) -> ManualDirectory:
        found: ManualDirectory = self.offload.tiers.tiers["remote"]._directory
        return found

    def answer(self, name: str, prompt: list[int] = PROMPT) -> None:
        self.add(name, prompt, 2)
        self.run()

    def answer_late(self, now: list[float], name: str, prompt: list[int] = PROMPT) -> None:
        """As `answer`, while the store says nothing for longer than a request waits."""
        self.directory.stuck = True
        self.add(name, prompt, 2)
        self.step(2)
        now[0] += directory.PATIENCE_SECONDS + 0.01
        self.step(12, copies=True)

    def forget(self) -> None:
        self.offload.manager.reset()
        assert self.scheduler.reset_prefix_cache()
        self.totals.clear()


@pytest.fixture(autouse=True)
def _played() -> Iterator[None]:
    with manual_remote():
        yield


@pytest.fixture
def make() -> Iterator[Callable[..., RemoteEngine]]:
    made: list[RemoteEngine] = []

    def one(**options: Any) -> RemoteEngine:
        made.append(RemoteEngine(**options))
        return made[-1]

    yield one
    for engine in made:
        engine.rest()
        engine.connector.shutdown()
        assert engine.directory.closed


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_engine_has_stored_another_one_loads(make, ranks):
    first, second = make(ranks=ranks), make(ranks=ranks)
    first.answer("a")
    assert first.totals["demoted_slots"] == FULL_BLOCKS
    second.answer("b")
    assert second.totals["promoted_slots"] == FULL_BLOCKS
    assert second.totals["hit_tokens"] == FULL_BLOCKS * 4


def test_what_came_once_is_shared_though_its_engine_expects_no_further_use(make, monkeypatch):
    """A policy that learns knows the uses of its own engine alone."""
    first, second = make(plugin={"eviction_policy": "auto"}), make()
    monkeypatch.setattr(
        AutoPolicy, "should_demote", lambda policy, slots: np.zeros(len(slots), bool)
    )
    first.answer("a")
    second.answer("b")
    assert second.totals["promoted_slots"] == FULL_BLOCKS


def test_what_one_rank_lacks_is_not_there(make):
    first, second = make(ranks=2), make(ranks=2)
    first.answer("a")
    gone = sorted(second.ranks[1].tier.records)
    for name in gone:
        del second.ranks[1].tier.records[name]
    second.answer("b")
    assert second.totals["promoted_slots"] == 0
    assert second.totals["hit_tokens"] == 0


def test_a_request_waits_for_the_answer_and_others_with_theirs_run(make, monkeypatch):
    first, second = make(), make()
    first.answer("a")
    second.directory.stuck = True
    second.add("b", PROMPT, 2)
    naps: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", naps.append)
        second.step(4)
    assert naps == [lower.GIVE_WAY_SECONDS] * 4, "the thread that asks has Python to itself"
    assert "b" not in second.answers
    assert len(second.directory.asked) == 1
    second.directory.stuck = False
    second.directory.answer()
    second.run()
    assert second.totals["promoted_slots"] == FULL_BLOCKS


def test_a_late_answer_is_not_waited_for_and_nothing_is_asked_before_it(make, now):
    first, second = make(), make()
    first.answer("a")
    directory = second.directory
    second.answer_late(now, "b")
    assert second.totals["late_lookups"] == 1
    assert second.totals["hit_tokens"] == 0
    assert second.offload.gauges()["remote_usable"] == 0
    second.add("c", OTHER, 2)
    second.step(12, copies=True)
    assert len(directory.asked) == 1
    directory.stuck = False
    directory.answer()
    assert second.offload.gauges()["remote_usable"] == 1


@pytest.mark.parametrize("steps_idle", [True, False])
def test_an_answer_that_fails_late_is_a_read_that_failed(make, now, steps_idle):
    """A master that hangs answers after seconds. Else it would be asked, and waited for, again."""
    engine = make()
    engine.answer_late(now, "a")
    assert "a" in engine.ended
    engine.directory.stuck, engine.directory.fails = False, True
    engine.directory.answer()
    if steps_idle:
        engine.step(2)
        assert engine.offload.gauges()["remote_usable"] == 0
    engine.directory.stuck = True
    engine.add("b", OTHER, 2)
    engine.step(4)
    assert "b" in engine.answers, "it waits for no other answer"
    engine.directory.stuck, engine.directory.fails = False, False
    engine.run()
    assert engine.offload.gauges()["remote_usable"] == 0
    assert len(engine.directory.asked) == 1
    now[0] += base.FIRST_PAUSE_SECONDS
    engine.answer("c", [9] * 9)
    assert len(engine.directory.asked) == 2


def test_a_late_answer_that_failed_long_ago_says_nothing(make, now):
    """An engine that rests hears of it with its next request, and the store may be back since."""
    first, second = make(), make()
    first.answer("a")
    second.answer_late(now, "b", [9] * 9)
    second.directory.stuck, second.directory.fails = False, True
    second.directory.answer()
    second.directory.fails = False
    now[0] += base.FIRST_PAUSE_SECONDS
    second.answer("c")
    assert second.totals["promoted_slots"] == FULL_BLOCKS


def test_what_is_stored_while_an_answer_is_late_is_written_when_it_has_come(make, now):
    """An engine that nobody asks would else not write it before the next request."""
    engine = make()
    engine.answer_late(now, "a")
    assert not engine.scheduler.get_num_unfinished_requests()
    assert engine.totals["demoted_slots"] == 0
    assert engine.scheduler.has_requests(), "it goes on stepping"
    engine.directory.stuck = False
    engine.directory.answer()
    engine.run()
    assert engine.totals["demoted_slots"] == FULL_BLOCKS


def test_a_store_that_cannot_be_asked_is_not_read_for_a_while(make, now):
    first, second = make(), make()
    first.answer("a")
    second.directory.fails = True
    second.answer("b")
    assert second.totals["hit_tokens"] == 0
    assert second.offload.gauges()["remote_usable"] == 0
    second.forget()
    second.answer("d")
    assert second.totals["promoted_slots"] == 0
    assert len(second.directory.asked) == 1
    second.forget()
    second.directory.fails = False
    now[0] += base.FIRST_PAUSE_SECONDS
    second.answer("c")
    assert second.totals["promoted_slots"] == FULL_BLOCKS


def test_an_error_long_after_others_has_a_short_pause_though_nothing_was_found_meanwhile(make, now):
    engine = make()
    engine.directory.fails = True
    for number in range(8):
        engine.answer(f"fails {number}", [number] * 9)
        now[0] += base.LONGEST_PAUSE_SECONDS
    engine.directory.fails = False
    for number in range(8):
        engine.answer(f"lacks {number}", [number + 10] * 9)
        now[0] += 3600
    engine.directory.fails = True
    engine.answer("last", [20] * 9)
    assert not engine.offload.tiers.tiers["remote"].may_read
    now[0] += base.FIRST_PAUSE_SECONDS
    assert engine.offload.tiers.tiers["remote"].may_read


def test_a_block_that_is_gone_is_computed_and_asked_for_again(make):
    engine = make()
    engine.answer("a")
    engine.forget()
    gone = dict(engine.store.records)
    engine.store.records.clear()
    engine.answer("b")
    assert engine.totals["tier_mismatches"] == 0
    assert engine.totals["lost_tier_slots"] == FULL_BLOCKS
    assert engine.totals["hit_tokens"] == 0
    assert engine.store.records.keys() == gone.keys(), "it was written again"


def test_after_a_reset_an_engine_shares_nothing_with_others(make):
    first, second = make(), make()
    first.answer("a")
    assert second.offload.resets.reset_cache() is None
    second.answer("b")
    assert second.totals["hit_tokens"] == second.totals["promoted_slots"] == 0
    second.answer("c", OTHER)
    third = make()
    third.answer("d", OTHER)
    assert third.totals["promoted_slots"] == 0
    second.forget()
    second.answer("e", OTHER)
    assert second.totals["promoted_slots"] == FULL_BLOCKS, "its own"


def test_an_answer_from_before_a_reset_is_not_believed(make):
    """What the store had then is found by no name of now, so its read would bring nothing."""
    make().answer("a")
    engine = make()
    engine.directory.stuck = True
    engine.add("b", PROMPT, 2)
    engine.step(2)
    assert engine.offload.resets.reset_cache() is None
    engine.directory.stuck = False
    engine.directory.answer()
    engine.run()
    assert engine.totals["lost_tier_slots"] == 0
    engine.rest()
    assert engine.totals["demoted_slots"] == FULL_BLOCKS


def test_what_was_written_before_a_reset_is_written_again_after_it(make):
    engine = make()
    engine.store.stuck = True
    engine.add("a", PROMPT, 2)
    engine.step(8, copies=True)
    assert sum(len(job.pairs) for job in engine.store.submitted) == FULL_BLOCKS
    assert engine.offload.resets.reset_cache() is None
    engine.store.stuck = False
    engine.rest()
    engine.forget()
    engine.answer("b")
    assert engine.totals["lost_tier_slots"] == 0
    engine.rest()
    engine.forget()
    engine.answer("c")
    assert engine.totals["promoted_slots"] == FULL_BLOCKS


def test_new_weights_end_the_sharing_and_a_reset_does_not_if_so_configured(make):
    engine = make(plugin={"remote": {**REMOTE["remote"], "keep_on_reset": True}})
    engine.offload.resets.reset_cache()
    assert engine.offload.tiers.tiers["remote"].generation == SHARED_GENERATION
    engine.change_weights()
    engine.offload.resets.weights_change()
    assert engine.offload.tiers.tiers["remote"].generation != SHARED_GENERATION


def test_what_was_told_lately_is_not_asked_again(now):
    recent = RecentKeys()
    recent.add([b"a"])
    now[0] += remote.KNOWN_SECONDS - 1
    assert recent.has([b"a", b"b"]).tolist() == [True, False]
    now[0] += remote.KNOWN_SECONDS + 2
    recent.add([b"c"])
    now[0] += remote.KNOWN_SECONDS
    assert recent.has([b"a", b"c"]).tolist() == [False, True]
    assert len(recent) == 1


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(remote, "MAX_KNOWN_KEYS", 8)
    recent = RecentKeys()
    keys = [b"%d" % number for number in range(100)]
    for key in keys:
        recent.add([key])
    known = recent.has(keys)
    assert known[-4:].all()
    assert known.sum() <= 8
