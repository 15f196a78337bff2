"""A disk and a remote store below host memory: where blocks go and come from, and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.tiers import base, reads
from kv_offload.tiers.remote import RecentKeys
from tests.kv_offload.tiers.test_remote import FULL_BLOCKS, PROMPT, RemoteEngine
from tests.support.manual_tier import ManualTier, disk_config, manual_remote
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.engine

ALL_TOKENS = FULL_BLOCKS * 4


class BothEngine(RemoteEngine):
    """An engine with a disk of its own, and a remote store that all of them share."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(plugin=disk_config(folder, **more.pop("disk", {})), **more)

    @property
    def disk(self) -> ManualTier:
        return self.ranks[0].tiers[0]

    @property
    def remote(self) -> ManualTier:
        return self.ranks[0].tiers[1]

    def forget(self) -> None:
        """Leave blocks in the lower tiers alone; what the remote store has must be asked for."""
        super().forget()
        self.offload.tiers.tiers["remote"]._known = RecentKeys()
        self.disk.happened.clear()
        self.remote.happened.clear()

    @property
    def read(self) -> tuple[int, int]:
        """Rows that were read from the disk, and from the remote store, since `forget`."""
        return self.disk.happened["promoted"], self.remote.happened["promoted"]


@pytest.fixture
def make(memory_folder: Path) -> Iterator[Callable[..., BothEngine]]:
    made: list[BothEngine] = []

    def one(**options: Any) -> BothEngine:
        made.append(BothEngine(memory_folder / f"disk {len(made)}", **options))
        return made[-1]

    with manual_remote():
        yield one
        for engine in made:
            engine.disk.stuck = engine.remote.stuck = False
            engine.rest()
            engine.connector.shutdown()
            assert engine.directory.closed


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_stored_goes_to_both_and_the_disk_is_read(make, ranks):
    engine = make(ranks=ranks)
    engine.answer("a")
    assert len(engine.disk.records) == len(engine.remote.records) == FULL_BLOCKS
    assert engine.totals["disk_written_bytes"] == engine.totals["remote_written_bytes"] > 0
    engine.forget()
    asked = len(engine.directory.asked)
    engine.answer("b")
    assert engine.read == (FULL_BLOCKS, 0)
    assert engine.totals["disk_read_bytes"] == engine.totals["promoted_bytes"] > 0
    assert engine.totals["remote_read_bytes"] == 0
    assert len(engine.directory.asked) == asked, "the store is not asked for what the disk has"


def test_one_prompt_is_read_from_both(make):
    first, second = make(), make()
    second.answer("a", PROMPT[:9])
    assert len(second.disk.records) == 2
    first.answer("b")
    second.forget()
    second.answer("c")
    assert second.read == (2, FULL_BLOCKS - 2)
    assert second.totals["hit_tokens"] == ALL_TOKENS


@pytest.mark.parametrize("fault", ["error", "mismatch"])
@pytest.mark.parametrize("sharing", [1, 3])
def test_what_the_disk_fails_to_read_is_read_from_the_remote_store(make, fault, sharing):
    engine = make()
    engine.answer("a")
    engine.forget()
    engine.disk.faults[fault] = FULL_BLOCKS
    for number in range(sharing):
        engine.add(f"b {number}", PROMPT, 2)
    engine.run()
    assert engine.disk.happened[fault] == engine.read[1] == FULL_BLOCKS
    assert engine.totals["lost_tier_slots"] == FULL_BLOCKS
    assert engine.totals["hit_tokens"] >= ALL_TOKENS
    assert engine.totals["late_promotions"] == 0


def test_a_disk_that_is_left_alone_is_replaced_by_the_remote_store(make, now):
    engine = make()
    engine.answer("a")
    engine.forget()
    engine.offload.tiers.tiers["disk"].read_failed()
    engine.answer("b")
    assert engine.read == (0, FULL_BLOCKS)
    assert engine.offload.gauges()["disk_usable"] == 0
    assert engine.offload.gauges()["remote_usable"] == 1
    now[0] += base.FIRST_PAUSE_SECONDS
    engine.forget()
    engine.answer("c")
    assert engine.read == (FULL_BLOCKS, 0)


def test_a_remote_store_that_is_away_does_not_keep_the_disk_from_serving(make, now):
    engine = make()
    engine.answer("a")
    engine.forget()
    engine.directory.fails = True
    engine.remote.faults["error"] = 100
    engine.answer("b", [*PROMPT, 1, 1, 1, 1])
    assert engine.read == (FULL_BLOCKS, 0)
    assert engine.totals["hit_tokens"] == ALL_TOKENS
    assert engine.offload.gauges()["disk_usable"] == 1
    assert engine.offload.gauges()["remote_usable"] == 0
    written = len(engine.disk.records)
    engine.answer("c", [9] * 9)
    assert len(engine.disk.records) == written + 2, "the disk is written meanwhile"
    now[0] += base.LONGEST_PAUSE_SECONDS
    engine.directory.fails = False
    engine.remote.faults.clear()
    engine.answer("d", [8] * 9)
    assert engine.offload.gauges()["remote_usable"] == 1


def test_a_copy_that_hangs_in_one_tier_does_not_stop_the_other(make, now):
    engine = make()
    engine.remote.stuck = True
    engine.add("a", PROMPT, 2)
    engine.step(8, copies=True)
    for _ in range(round(2 * base.STUCK_SECONDS) + 4):
        now[0] += 0.5
        engine.step()
    assert engine.offload.gauges()["remote_usable"] == 0
    assert len(engine.disk.records) == FULL_BLOCKS
    engine.offload.manager.reset()
    engine.answer("b", [9] * 9)
    assert engine.totals["demoted_slots"] == FULL_BLOCKS + 2
    assert not engine.scheduler.has_requests(), "it rests though a write hangs"


@pytest.mark.parametrize("keeps", [True, False])
def test_each_tier_keeps_over_a_reset_what_its_own_key_says(make, keeps):
    engine = make(disk={"keep_on_reset": keeps})
    engine.answer("a")
    engine.forget()
    engine.offload.resets.reset_cache()
    assert (engine.offload.gauges()["tier_slots_in_use"] > 0) == keeps
    engine.answer("b")
    assert engine.read == (FULL_BLOCKS * keeps, 0)
    engine.change_weights()
    engine.offload.resets.weights_change()
    assert engine.offload.gauges()["tier_slots_in_use"] == 0


def test_a_quota_leaves_the_beginning_of_a_prompt_whose_rest_is_read(tmp_path):
    """Else each read of the rest would have the beginning read again, and so on."""
    plugin = {**disk_config(tmp_path), "max_share_per_salt": 0.25}
    engine = PlayedEngine(plugin=plugin, blocks=100, async_scheduling=True)

    def serve(name, prompt):
        engine.serve(name, prompt, 1)
        assert engine.scheduler.reset_prefix_cache()

    prompt = [*[1, 0, 0] * 18, 1, 0, 1]  # 14 blocks, where a tenant has 16
    serve("a", prompt)
    engine.offload.manager.reset()
    for notify in engine.offload._subscribers.emptied:
        notify()
    serve("its beginning", prompt[: 7 * 4 + 1])
    serve("other", [0] * 37)
    engine.totals.clear()
    serve("b", prompt)
    assert engine.totals["quota_evictions"] > 0
    assert engine.totals["promoted_slots"] == 7
    assert engine.totals["hit_tokens"] == 14 * 4
    engine.rest()
    engine.connector.shutdown()


def hang(engine, now, *prompts):
    """Have the remote store hang in reads of these prompts for so long that it is left alone."""
    engine.remote.stuck = True
    for number, prompt in enumerate(prompts):
        engine.add(f"hangs {number}", prompt, 1)
    engine.step(3, copies=True)
    assert engine.remote.submitted
    for _ in range(round(2 * base.STUCK_SECONDS) + 4):
        now[0] += 0.5
        engine.step(1, copies=True)
    assert engine.offload.gauges()["remote_usable"] == 0


@pytest.mark.parametrize("more", [[], [1, 1, 1, 1]])
def test_a_prefix_that_a_hanging_store_reads_is_waited_for_no_more(make, now, more):
    """It was a wait of seconds for each request that has it, until the store was back."""
    first, second = make(), make()
    first.answer("a")
    hang(second, now, PROMPT)
    assert second.scheduler.reset_prefix_cache()
    second.add("b", [*PROMPT, *more], 2)
    second.step(5, copies=True)
    assert len(second.answers["b"]) == 2, "the clock stands"
    assert second.totals["late_promotions"] == 1, "of the first request"


def test_a_store_that_hangs_leaves_the_disk_room_to_read(make, now):
    first, second = make(blocks=100), make(blocks=100)
    prompts = [[*([number] * 3 + [1]) * 16, 1] for number in range(2)]
    second.answer("own")
    for number, prompt in enumerate(prompts):
        first.answer(f"a {number}", prompt)
    second.forget()
    hang(second, now, *prompts)
    filling = second.offload.tiers.promoter.reads.running_slots
    assert filling == second.offload.manager.usable_slots // reads.MAX_PROMOTING_SHARE
    second.answer("b")
    assert second.read[0] == FULL_BLOCKS
    assert second.totals["hit_tokens"] == ALL_TOKENS
