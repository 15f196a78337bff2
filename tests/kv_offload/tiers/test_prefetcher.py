"""Requests that vLLM has queued: lower tiers are read before their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.scheduler.loads import lookups
from kv_offload.tiers import prefetcher, promoter
from kv_offload.tiers.base import FIRST_PAUSE_SECONDS
from kv_offload.tiers.directory import PATIENCE_SECONDS
from kv_offload.tiers.remote import KNOWN_SECONDS, RecentKeys, RemoteTier
from tests.support.manual_tier import REMOTE, ManualTier, disk_config, manual_remote
from tests.support.played_cases import FULL, STATE
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.engine

PROMPTS = [
    [number, *[0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1]] for number in range(8)
]
FULL_BLOCKS = len(PROMPTS[0]) // 4
ALL_TOKENS = FULL_BLOCKS * 4


class QueueEngine(PlayedEngine):
    """An engine that runs one request at a time; only its lower tier has the prompts."""

    def __init__(self, plugin: dict[str, Any], **more: Any) -> None:
        super().__init__(plugin=plugin, max_num_seqs=1, async_scheduling=True, **more)
        for number, prompt in enumerate(PROMPTS):
            self.add(f"first {number}", prompt, 1)
            self.run()
        self.offload.manager.reset()
        assert self.scheduler.reset_prefix_cache()
        self.add("busy", [9] * 5, 60)
        self.step(4, copies=True)
        assert "busy" in self.answers
        self.totals.clear()
        self.tier.happened.clear()

    @property
    def tier(self) -> ManualTier:
        found = self.ranks[0].tier
        assert found is not None
        return found

    @property
    def read(self) -> int:
        return self.tier.happened["promoted"]


@pytest.fixture(params=["disk", "remote"])
def make(
    request: pytest.FixtureRequest, memory_folder: Path
) -> Iterator[Callable[..., QueueEngine]]:
    made: list[QueueEngine] = []
    plugin = disk_config(memory_folder) if request.param == "disk" else REMOTE

    def one(**more: Any) -> QueueEngine:
        made.append(QueueEngine({**plugin, **more.pop("plugin", {})}, **more))
        return made[-1]

    with manual_remote():
        yield one
        for engine in made:
            engine.tier.stuck = False
            engine.run()
            engine.rest()
            engine.connector.shutdown()


def steps_of_turn(engine: QueueEngine, name: str, *, queued: bool) -> int:
    """Return the steps to the first token of a request that the engine lacks.

    With `queued` it comes while another one runs, and the steps count from the end of that one.
    """
    engine.add(f"busy before {name}", [len(name), 9, 9, 9, 9], 60)
    engine.step(4, copies=True)
    assert f"busy before {name}" in engine.answers
    if queued:
        engine.add(name, PROMPTS[0], 2)
        engine.step(6, copies=True)
        assert name not in engine.answers
    engine.abort(f"busy before {name}")
    if not queued:
        engine.add(name, PROMPTS[0], 2)
    steps = 0
    while name not in engine.answers:
        engine.step(1, copies=True)
        steps += 1
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    return steps


def test_after_a_pause_a_turn_that_was_queued_starts_as_fast_as_from_host_memory(make):
    """A tool ran so long that host memory has dropped the conversation."""
    engine = make()
    engine.abort("busy")
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    below = steps_of_turn(engine, "below", queued=True)
    assert engine.totals["prefetched_slots"] == FULL_BLOCKS
    in_host_memory = steps_of_turn(engine, "in host memory", queued=True)
    assert engine.totals["prefetched_slots"] == engine.totals["promoted_slots"] == FULL_BLOCKS
    assert engine.totals["hit_tokens"] == 2 * ALL_TOKENS
    engine.offload.manager.reset()
    not_queued = steps_of_turn(engine, "not queued", queued=False)
    assert below == in_host_memory < not_queued


def test_no_more_is_read_ahead_than_a_share_of_host_memory(make):
    """More would evict what was read for those before. Those that run make room for the next."""
    engine = make()
    for number, prompt in enumerate(PROMPTS):
        engine.add(str(number), prompt, 1)
    engine.step(12, copies=True)
    share = engine.offload.manager.usable_slots // prefetcher.MAX_AHEAD_SHARE
    assert share <= engine.read < share + FULL_BLOCKS < len(PROMPTS) * FULL_BLOCKS
    engine.abort("busy")
    engine.run()
    assert engine.totals["hit_tokens"] == len(PROMPTS) * ALL_TOKENS
    assert engine.totals["late_promotions"] == 0


def test_the_wait_for_a_slow_tier_begins_when_the_engine_would_run_the_request(make, now):
    """However long it was queued: else it would be computed though its read is about to end."""
    engine = make()
    engine.tier.stuck = True
    engine.add("a", PROMPTS[0], 2)
    engine.step(4, copies=True)
    assert engine.tier.submitted
    now[0] += 2 * promoter.MAX_WAIT_SECONDS
    engine.abort("busy")
    engine.step(4, copies=True)
    assert "a" not in engine.answers
    now[0] += promoter.MIN_WAIT_SECONDS / 2
    engine.tier.stuck = False
    engine.run()
    assert engine.totals["hit_tokens"] == ALL_TOKENS
    engine.tier.stuck = True
    engine.add("busy", [9] * 5, 60)
    engine.step(3, copies=True)
    engine.add("b", PROMPTS[1], 2)
    engine.step(3, copies=True)
    engine.abort("busy")
    engine.step(3, copies=True)
    assert "b" not in engine.answers
    now[0] += promoter.MAX_WAIT_SECONDS
    engine.step(4, copies=True)
    assert "b" in engine.answers, "it does not wait without end"


def has_itself(engine: QueueEngine) -> QueueEngine:
    """Have the second prompt in the engine's own cache, and the engine busy again."""
    engine.abort("busy")
    engine.add("b", PROMPTS[1], 1)
    engine.run()
    engine.offload.manager.reset()
    engine.add("busy", [9] * 5, 60)
    engine.step(4, copies=True)
    engine.tier.happened.clear()
    return engine


def test_what_the_engine_has_itself_and_what_is_not_wanted_is_not_read(make):
    engine = has_itself(make(blocks=80))
    engine.add("in the GPU's cache", PROMPTS[1], 1)
    params = {"kv_offload": {"load": False}}
    engine.add("not wanted", PROMPTS[2], 1, extra_args={"kv_transfer_params": params})
    engine.step(6, copies=True)
    assert engine.read == 0


def test_what_the_engine_has_itself_is_not_waited_for(make):
    """How much it has of a hybrid model's prompts is hard to tell ahead, so they are read."""
    engine = has_itself(make(blocks=80, groups=(FULL, STATE)))
    engine.tier.stuck = True
    engine.add("in the GPU's cache", PROMPTS[1], 1)
    engine.step(6, copies=True)
    assert engine.totals["prefetched_slots"] > 0
    engine.abort("busy")
    engine.step(4, copies=True)
    assert "in the GPU's cache" in engine.answers


def test_a_request_that_is_aborted_in_the_queue_leaves_nothing(make):
    engine = make()
    engine.tier.stuck = True
    engine.add("a", PROMPTS[0], 2)
    engine.step(4, copies=True)
    known = len(engine.offload._requests)
    engine.abort("a")
    engine.step(2, copies=True)
    assert len(engine.offload._requests) == known - 1
    engine.tier.stuck = False
    engine.step(2, copies=True)
    assert engine.offload.tiers.promoter.reads.running_slots == 0


@pytest.fixture
def remote(now):
    """An engine whose remote store has to be asked for what it has."""
    with manual_remote():
        engine = QueueEngine(REMOTE)
        tier_of(engine)._known = RecentKeys()
        yield engine
        engine.abort("busy")
        engine.run()
        engine.rest()
        engine.connector.shutdown()


def tier_of(engine: QueueEngine) -> RemoteTier:
    found = engine.offload.tiers.tiers["remote"]
    assert isinstance(found, RemoteTier)
    return found


def test_what_was_answered_late_is_asked_again_at_the_requests_turn(remote, now):
    directory = tier_of(remote)._directory
    directory.stuck = True
    remote.add("a", PROMPTS[0], 2)
    remote.step(2, copies=True)
    now[0] += PATIENCE_SECONDS + 0.05
    remote.step(1, copies=True)
    assert remote.totals["late_lookups"] == 1
    directory.stuck = False
    directory.answer()
    now[0] += FIRST_PAUSE_SECONDS
    remote.step(2, copies=True)
    tier_of(remote)._known = RecentKeys()
    remote.abort("busy")
    remote.run()
    assert remote.totals["hit_tokens"] == ALL_TOKENS


def test_what_is_forgotten_while_a_request_is_queued_is_asked_again(remote, now):
    remote.add("a", PROMPTS[0], 2)
    remote.step(6, copies=True)
    assert remote.read == FULL_BLOCKS
    now[0] += KNOWN_SECONDS
    tier_of(remote)._known = RecentKeys()
    remote.offload.manager.reset()  # stands for evictions meanwhile
    remote.abort("busy")
    remote.run()
    assert remote.totals["hit_tokens"] == ALL_TOKENS


def test_what_a_store_lacks_is_asked_once_in_the_queue_and_not_again(remote, now):
    asked = len(tier_of(remote)._directory.asked)
    remote.add("a", [7, *PROMPTS[0]], 2)
    remote.step(4, copies=True)
    now[0] += KNOWN_SECONDS / 2
    remote.abort("busy")
    remote.run()
    assert "a" in remote.ended
    assert len(tier_of(remote)._directory.asked) == asked + 1


def test_one_question_is_asked_ahead_at_a_time(remote):
    """A store answers in order, and the question of a request that could run comes after it."""
    directory = tier_of(remote)._directory
    asked = len(directory.asked)
    directory.stuck = True
    for number, prompt in enumerate(PROMPTS):
        remote.add(str(number), prompt, 1)
    remote.step(4, copies=True)
    assert len(directory.asked) == asked + 1
    directory.stuck = False
    directory.answer()
    remote.step(4, copies=True)
    assert len(directory.asked) > asked + 2


def test_a_long_prefix_on_the_gpu_keeps_no_request_from_being_looked_up(monkeypatch, make):
    """Neither the one that has it nor the next: to find its end takes no keys of the step."""
    engine = has_itself(make(blocks=80))
    engine.totals.clear()
    monkeypatch.setattr(lookups, "STEP_KEYS", FULL_BLOCKS)
    engine.step(2, copies=True)
    engine.add("long", [*PROMPTS[1], 1, 1, 1, 1], 1)
    engine.add("c", PROMPTS[2], 1)
    engine.step(6, copies=True)
    assert engine.totals["prefetched_slots"] == FULL_BLOCKS
    assert engine.read >= FULL_BLOCKS


def test_what_requests_share_counts_once(make):
    engine = make()
    engine.tier.stuck = True
    for number in range(6):
        engine.add(f"same {number}", PROMPTS[3], 1)
    engine.add("other", PROMPTS[4], 1)
    engine.step(10, copies=True)
    assert engine.totals["prefetched_slots"] == 2 * FULL_BLOCKS
    assert engine.offload.tiers.promoter.reads.running_slots == 2 * FULL_BLOCKS
    engine.tier.stuck = False
