"""A disk below host memory, as requests see it: what waits, what is read, what is written."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from kv_swap.tiers.engine import TierDirection
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from kv_offload.cache.disk_index.contents import GENERATION_BYTES
from kv_offload.cache.policies.auto import AutoPolicy
from kv_offload.engines.vllm.model import groups
from kv_offload.scheduler.timing import COPY_EVERY
from kv_offload.tiers import base, demoter, lower, promoter
from tests.support.beside_steps import report, teach
from tests.support.manual_tier import ManualTier, disk_config
from tests.support.played_cases import PROMPT
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import name_prefixes

pytestmark = pytest.mark.engine

OTHER = [0, *PROMPT[1:]]
FULL_BLOCKS = len(PROMPT) // 4


class DiskEngine(PlayedEngine):
    """An engine with a disk, which has both prompts at the start; host memory has none."""

    def __init__(
        self, folder: Path, *, prompts: bool = True, disk: Any = None, **more: Any
    ) -> None:
        """`disk` and `plugin` are keys of the configuration."""
        plugin = {**disk_config(folder, **(disk or {})), **more.pop("plugin", {})}
        super().__init__(plugin=plugin, **{"async_scheduling": True, **more})
        for index, prompt in enumerate((PROMPT, OTHER) if prompts else ()):
            self.add(f"first {index}", prompt, 1)
            self.run()
        self.forget()
        self.totals.clear()

    @property
    def disk(self) -> ManualTier:
        tier = self.ranks[0].tier
        assert tier is not None
        return tier

    def forget(self) -> None:
        self.offload.manager.reset()
        assert self.scheduler.reset_prefix_cache()

    def running(self, direction: TierDirection) -> list[int]:
        jobs = [job for job in self.disk.submitted if job.direction is direction]
        return [slot for job in jobs for slot in job.pairs[:, 0].tolist()]


def step_for(engine: DiskEngine, now: list[float], seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        now[0] += 0.5
        engine.step()


@pytest.fixture
def make(memory_folder: Path) -> Iterator[Callable[..., DiskEngine]]:
    made: list[DiskEngine] = []
    yield lambda **more: made.append(DiskEngine(memory_folder, **more)) or made[-1]
    for engine in made:
        engine.connector.shutdown()


@pytest.fixture
def engine(make: Callable[..., DiskEngine]) -> Iterator[DiskEngine]:
    made = make()
    yield made
    made.disk.stuck = False
    made.rest()


def ask(engine: DiskEngine, *names: str, prompt: list[int] = PROMPT, steps: int = 3) -> None:
    for name in names:
        engine.add(name, prompt, 2)
    engine.step(steps)


def test_a_step_that_computes_nothing_leaves_python_to_the_threads_of_the_disk(engine, monkeypatch):
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    engine.step(2)
    assert naps == [], "nothing is under way"
    engine.disk.stuck = True
    ask(engine, "a", steps=1)
    naps.clear()
    engine.step(2)
    assert naps == [lower.GIVE_WAY_SECONDS] * 2
    engine.add("b", [0, 0, 0, 1, 1], 8)
    engine.step(1)
    naps.clear()
    engine.step(2)
    assert naps == [], "others compute"


def test_a_request_is_computed_where_its_time_is_over(now, engine):
    engine.disk.stuck = True
    ask(engine, "a")
    now[0] += promoter.MAX_WAIT_SECONDS
    engine.run(40) if engine.scheduler.running else engine.step(4)
    assert "a" in engine.answers
    assert engine.totals["late_promotions"] == 1
    assert engine.totals["hit_tokens"] == 0
    assert len(engine.running(TierDirection.PROMOTE)) == FULL_BLOCKS, "it goes on"


def test_a_request_that_was_preempted_waits_for_the_disk_again(now, engine):
    engine.disk.stuck = True
    engine.add("a", PROMPT, 12)
    engine.step(3)
    assert engine.running(TierDirection.PROMOTE)
    engine.disk.stuck = False
    engine.step(6, copies=True)
    assert "a" in engine.answers
    now[0] += 2 * promoter.MAX_WAIT_SECONDS
    engine.step(2, copies=True)
    engine.totals.clear()
    engine.disk.stuck = True
    engine.offload.manager.reset()
    assert engine.reset(reset_running_requests=True)
    engine.step(3)
    assert len(engine.running(TierDirection.PROMOTE)) >= FULL_BLOCKS
    engine.disk.stuck = False
    engine.run()
    assert engine.totals["late_promotions"] == 0
    assert engine.totals["hit_tokens"] >= FULL_BLOCKS * 4


def test_what_came_in_time_is_loaded(now, engine, monkeypatch):
    monkeypatch.setattr(engine.offload.tiers.promoter.reads, "_job_slots", 2)
    engine.disk.stuck = True
    ask(engine, "a")
    engine.disk.run(0)
    engine.step(2)
    assert "a" not in engine.answers
    now[0] += promoter.MAX_WAIT_SECONDS
    engine.step(6)
    assert engine.totals["hit_tokens"] == 2 * 4
    assert engine.totals["late_promotions"] == 1


def test_what_is_not_what_its_name_says_is_computed_and_forgotten(engine):
    for place, (name, content) in engine.disk.records.items():
        engine.disk.records[place] = (name + b"?", content)
    ask(engine, "a")
    engine.run()
    assert engine.totals["tier_mismatches"] == FULL_BLOCKS
    assert engine.totals["lost_tier_slots"] == FULL_BLOCKS
    assert engine.totals["promoted_slots"] == engine.totals["hit_tokens"] == 0
    # They were stored and written again meanwhile.
    engine.forget()
    ask(engine, "b")
    engine.run()
    assert engine.totals["promoted_slots"] == FULL_BLOCKS


def test_the_disk_is_not_read_for_a_while_after_an_error_and_tried_again(now, engine):
    engine.disk.faults["error"] = 1
    ask(engine, "a")
    engine.run()
    assert engine.totals["tier_errors"] == 1
    assert engine.offload.gauges()["disk_usable"] == 0
    engine.forget()
    ask(engine, "b", prompt=OTHER)
    engine.run()
    assert TierDirection.PROMOTE not in [job.direction for job in engine.disk.submitted]
    assert engine.totals["promoted_slots"] == FULL_BLOCKS - 1
    engine.forget()
    now[0] += base.FIRST_PAUSE_SECONDS
    ask(engine, "c", prompt=OTHER)
    engine.run()
    assert engine.totals["promoted_slots"] >= 2 * FULL_BLOCKS - 1


def test_the_disk_is_not_written_for_a_while_after_an_error_and_read_meanwhile(now, engine):
    other = [9] * 9
    engine.disk.faults["error"] = 1
    ask(engine, "a", prompt=other)
    engine.run()
    assert engine.totals["tier_errors"] == engine.totals["lost_tier_slots"] == 1
    engine.totals.clear()
    engine.forget()
    ask(engine, "b")
    ask(engine, "c", prompt=[8] * 9)
    engine.run()
    assert engine.totals["promoted_slots"] == FULL_BLOCKS
    assert engine.totals["demoted_slots"] == 0
    now[0] += base.FIRST_PAUSE_SECONDS
    ask(engine, "d", prompt=[7] * 9)
    engine.run()
    assert engine.totals["demoted_slots"] > 0


def replace_wake(
    monkeypatch: pytest.MonkeyPatch, engine: DiskEngine, wake: Callable[[], object]
) -> None:
    tier = engine.offload.tiers
    monkeypatch.setattr(tier, "_engine", dataclasses.replace(tier._engine, wake=wake))


def test_an_engine_that_rests_is_woken_once_the_disk_may_be_written_again(now, engine, monkeypatch):
    """It would else write what has come in the pause with its next request only."""
    monkeypatch.setattr(base, "FIRST_PAUSE_SECONDS", 0.1)
    woken = threading.Event()
    replace_wake(monkeypatch, engine, woken.set)
    engine.disk.faults["error"] = 1
    ask(engine, "a", prompt=[9] * 9)
    engine.run()
    engine.totals.clear()
    ask(engine, "b", prompt=[8] * 9)
    engine.run()
    assert engine.totals["demoted_slots"] == 0
    assert not engine.scheduler.has_requests(), "it rests"
    assert woken.wait(10)  # sooner than a break runs out of time
    now[0] += base.FIRST_PAUSE_SECONDS
    assert engine.scheduler.has_requests()
    engine.run()
    assert engine.totals["demoted_slots"] == 2


def test_an_engine_that_has_ended_is_not_woken(make, monkeypatch):
    monkeypatch.setattr(base, "FIRST_PAUSE_SECONDS", 60.0)
    engine = make()
    replace_wake(monkeypatch, engine, pytest.fail)
    engine.disk.faults["error"] = 1
    ask(engine, "a", prompt=[9] * 9)
    engine.run()
    (alarm,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    engine.connector.shutdown()
    assert alarm.finished.is_set()
    alarm.join(120)


def test_a_bad_place_fails_one_write_and_no_further_one(now, engine, caplog):
    """Else it would be used again first, and every write after a pause would fail."""
    bad = engine.offload.tiers.tiers["disk"].manager.slots_in_use + 1
    engine.disk.bad_places.add(bad)
    for name in "abc":
        ask(engine, name, prompt=[ord(name)] * 9)
        engine.run()
        assert engine.totals["tier_errors"] == engine.totals["lost_tier_slots"] == 1
        now[0] += base.FIRST_PAUSE_SECONDS
        engine.forget()
    assert engine.totals["demoted_slots"] == 2 * 3 - 1
    gauges = engine.offload.gauges()
    assert gauges["tier_slots_set_aside"] == 1
    assert gauges["tier_slots_in_use"] == 2 * FULL_BLOCKS + 2 * 3 - 1
    assert caplog.text.count("set aside until the next start") == 1
    assert engine.offload.resets.reset_cache() is None
    ask(engine, "d", prompt=[ord("d")] * 9)
    engine.run()
    assert engine.totals["tier_errors"] == 1
    assert engine.offload.gauges()["tier_slots_set_aside"] == 1


def test_each_further_error_has_a_longer_pause(now):
    pause = base.Pause()
    assert pause.is_over
    pauses = []
    for _ in range(8):
        pause.begin()
        begin = now[0]
        while not pause.is_over:
            now[0] += 1
        pauses.append(now[0] - begin)
    assert pauses[:3] == [5, 10, 20]
    assert max(pauses) == base.LONGEST_PAUSE_SECONDS
    pause.went_well()
    assert pause.begin() == base.FIRST_PAUSE_SECONDS


def test_writes_that_go_well_leave_the_pauses_of_reads_as_they_are(now, engine):
    engine.offload.tiers.tiers["disk"].read_failed()
    ask(engine, "a", prompt=[9] * 9)
    engine.run()
    assert engine.totals["demoted_slots"] > 0
    now[0] += base.FIRST_PAUSE_SECONDS
    engine.offload.tiers.tiers["disk"].read_failed()
    now[0] += base.FIRST_PAUSE_SECONDS
    assert not engine.offload.tiers.tiers["disk"].may_read


def test_errors_that_were_under_way_together_are_one_pause(now, engine):
    below = engine.offload.tiers.tiers["disk"]
    for fail, may in ((below.read_failed, "may_read"), (below.write_failed, "may_write")):
        fail()
        fail()
        now[0] += base.FIRST_PAUSE_SECONDS
        assert getattr(below, may)


def test_that_nothing_is_written_is_not_told_while_nothing_is_read(now, engine, caplog):
    """It is one outage then. Once the disk may be read again, a write that fails says something."""
    below = engine.offload.tiers.tiers["disk"]
    below.read_failed()
    below.write_failed()
    assert (below.may_read, below.may_write) == (False, False)
    assert caplog.text.count("the disk could not be read. It is not read for 5 s") == 1
    assert "could not be written" not in caplog.text
    now[0] += base.FIRST_PAUSE_SECONDS
    below.write_failed()
    assert caplog.text.count("the disk could not be written. It is not written for 10 s") == 1
    below.read_failed()  # requests notice that, so it is told in any case
    assert caplog.text.count("the disk could not be read. It is not read for 10 s") == 1


def test_a_copy_that_hangs_keeps_the_disk_from_being_used_until_it_ends(now, engine, caplog):
    engine.disk.stuck = True
    ask(engine, "a")
    step_for(engine, now, base.STUCK_SECONDS + 1)
    assert "a" in engine.answers
    ask(engine, "b", prompt=OTHER, steps=8)
    assert "b" in engine.answers
    assert len(engine.disk.submitted) == 1
    assert caplog.text.count("has not ended in") == 1
    engine.disk.stuck = False
    engine.run()
    assert engine.offload.gauges()["disk_usable"] == 1


def begin_writes(
    engine: DiskEngine, monkeypatch: pytest.MonkeyPatch, at_once: int = FULL_BLOCKS
) -> int:
    """Have a new prompt written in jobs that end when the test says so; return how many."""
    monkeypatch.setattr(engine.offload.tiers.demoters["disk"], "_job_slots", 1)
    engine.disk.stuck = True
    engine.add("new", [1 - token for token in PROMPT], 1)
    engine.step(12, copies=True)
    writes = len(engine.disk.submitted)
    assert writes == len(engine.running(TierDirection.DEMOTE)) == at_once
    return writes


def test_all_jobs_of_a_plan_are_asked_for_at_once(now, engine, monkeypatch):
    """To ask takes as long for one slot as for a hundred, and a job has few slots of 2 MiB."""
    disk = engine.offload.tiers.demoters["disk"]._tier
    written, read = Mock(wraps=disk.begin_write), Mock(wraps=disk.begin_read)
    monkeypatch.setattr(disk, "begin_write", written)
    monkeypatch.setattr(disk, "begin_read", read)
    assert begin_writes(engine, monkeypatch) == FULL_BLOCKS
    asked = [len(call.args[0]) for call in written.call_args_list]
    assert asked == [FULL_BLOCKS - 1, 1]  # the last one was stored later
    engine.disk.stuck = False
    engine.rest()
    engine.forget()
    monkeypatch.setattr(engine.offload.tiers.promoter.reads, "_job_slots", 1)
    engine.disk.stuck = True
    ask(engine, "read")
    assert len(engine.disk.submitted) == FULL_BLOCKS
    read.assert_called_once()


def test_an_idle_engine_hears_how_all_writes_end_though_one_has_failed(now, engine, monkeypatch):
    """Else the index lacks what went well, and errors that are heard of later are a new pause."""
    writes = begin_writes(engine, monkeypatch)
    known = engine.offload.gauges()["tier_slots_in_use"] - writes
    engine.disk.faults["error"] = 2
    engine.disk.run()
    engine.step(2)
    assert not engine.offload.tiers.tiers["disk"].may_write
    assert engine.scheduler.has_requests(), "it goes on stepping"
    engine.disk.stuck = False
    engine.run()
    assert engine.totals["lost_tier_slots"] == 2
    assert engine.totals["demoted_slots"] == writes - 2
    assert len(engine.offload.tiers.tiers["disk"].manager.readable_slots()) == known + writes - 2
    now[0] += base.FIRST_PAUSE_SECONDS
    assert engine.offload.tiers.tiers["disk"].may_write, "they were one outage"


def test_an_idle_engine_rests_though_a_write_hangs(now, engine, monkeypatch):
    begin_writes(engine, monkeypatch)
    step_for(engine, now, base.STUCK_SECONDS + 1)
    assert engine.running(TierDirection.DEMOTE)
    assert not engine.scheduler.has_requests()


def test_a_disk_that_is_written_slowly_is_used_as_long_as_one_write_after_the_other_ends(
    now, engine, monkeypatch
):
    """What waits for its turn does not hang, however long that takes."""
    writes = begin_writes(engine, monkeypatch)
    for _ in range(writes - 1):
        step_for(engine, now, 0.9 * base.STUCK_SECONDS)
        assert engine.offload.gauges()["disk_usable"] == 1
        engine.disk.run(0)
        engine.step(2)
    ask(engine, "a")
    assert engine.running(TierDirection.PROMOTE)


def test_a_write_that_hangs_is_noticed_though_later_ones_end(now, engine, monkeypatch):
    begin_writes(engine, monkeypatch)
    engine.disk.run(0)
    engine.step(2)
    for _ in range(2):
        step_for(engine, now, 0.6 * base.STUCK_SECONDS)
        engine.disk.run(1)
        engine.step(2)
    assert engine.offload.gauges()["disk_usable"] == 0


def test_no_copy_hangs_because_the_engine_made_no_step(now, engine, monkeypatch, caplog):
    """The user of an engine in his own process may do something else meanwhile."""
    begin_writes(engine, monkeypatch)
    now[0] += 60 * base.STUCK_SECONDS
    engine.step(2)
    assert engine.offload.gauges()["disk_usable"] == 1
    assert "has not ended" not in caplog.text


def test_of_ranks_that_tell_in_turn_how_fast_they_read_the_slowest_counts(engine):
    for _ in range(15):
        for rank, speed in enumerate((1e3, 1e9, 1e9)):
            report(engine, {}, rank, bytes_per_second={"disk": speed})
    assert engine.offload.gauges()["disk_read_bytes_per_second"] == 1e3


def test_a_hit_is_computed_where_reading_takes_longer(engine):
    teach(engine, 1e12)
    for _ in range(20):
        report(engine, {}, bytes_per_second={"disk": 1.0})
    for number in range(COPY_EVERY - 1):
        ask(engine, f"a{number}")
        engine.run()
        assert engine.totals["promoted_slots"] == 0
        engine.forget()
    ask(engine, "last")  # now and then one is read, to measure the disk again
    engine.run()
    assert engine.totals["promoted_slots"] == FULL_BLOCKS


def test_always_load_reads_all(make):
    engine = make(plugin={"load_or_recompute": "always_load"})
    for _ in range(20):
        report(engine, {}, bytes_per_second={"disk": 1.0})
    ask(engine, "a")
    engine.run()
    assert engine.totals["promoted_slots"] == FULL_BLOCKS


def test_what_was_stored_first_is_written_first_and_no_faster_than_allowed(make, now):
    """A slot has 64 bytes here."""
    engine = make(prompts=False, disk={"write_rate": "128B"})
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add(name, prompt, 1)
        engine.step(8, copies=True)
    names: list[list[bytes]] = []
    for _ in range(7):
        names.append([name for name, _ in engine.disk.records.values()])
        now[0] += 1
        engine.step(2, copies=True)
    assert [len(written) for written in names] == [2, 4, 6, 8, 10, 10, 10]
    keys = [name[GENERATION_BYTES:] for name in names[-1]]
    order = [engine.known[key][0].tolist() for key in keys]
    # Names of tokens tell of the prefix: all of the first prompt's come first.
    assert order[:FULL_BLOCKS] == [
        list(name_prefixes(PROMPT, 0)[n : n + 4]) for n in range(0, 20, 4)
    ]


def test_what_decodes_stored_while_nothing_was_written_is_written_by_one_job(now, engine):
    """To plan 256 jobs of a slot takes 15 ms of a step."""
    engine.offload.tiers.tiers["disk"].write_failed()
    engine.add("a", [9] * 9, max_tokens=40)
    engine.step(30, copies=True)
    assert engine.totals["stored_slots"] > 6
    assert engine.running(TierDirection.DEMOTE) == []
    now[0] += base.FIRST_PAUSE_SECONDS
    engine.disk.stuck = True
    engine.step(2, copies=True)
    (job,) = engine.disk.submitted
    assert len(job.pairs) > 6
    engine.disk.stuck = False


@pytest.mark.parametrize(("sharing", "slots"), [(1, 2), (2, 4)])
def test_a_replica_writes_no_faster_than_allowed_whether_or_not_its_ranks_share_memory(
    sharing, slots, make, now, monkeypatch
):
    """Ranks of latent attention would share it, but cannot if they are on several hosts, say."""
    equal = [2, 1, 1]  # the scheduler expects two, each rank finds itself alone
    monkeypatch.setattr(groups, "ranks_with_equal_bytes", lambda *_: equal.pop(0))
    engine = make(prompts=False, ranks=2, handshake=False, disk={"write_rate": "256B"})
    capacities = [rank.connector.offload_worker.capacity() for rank in engine.ranks]
    told = [
        replace(one, tiers={"disk": replace(one.tiers["disk"], sharing_ranks=sharing)})
        for one in capacities
    ]
    engine.offload.take_capacities(told)
    engine.add("a", PROMPT, 1)
    engine.step(8, copies=True)
    assert len(engine.disk.records) == slots
    now[0] += 0.5
    engine.step(2, copies=True)
    assert len(engine.disk.records) == min(slots + slots // 2, FULL_BLOCKS)


def test_a_full_disk_forgets_what_was_used_least_recently(make):
    # 64 KiB of what the file says of itself, and one record to try things at.
    engine = make(prompts=False, disk={"bytes": f"{65536 + 8192 * (2 * FULL_BLOCKS)}B"})
    engine.add("a", PROMPT, 1)
    engine.run()
    engine.add("b", OTHER, 1)
    engine.run()
    assert engine.gauges["tier_slots"] == engine.gauges["tier_slots_in_use"] == 2 * FULL_BLOCKS - 1
    engine.forget()
    engine.add("c", OTHER, 1)
    engine.run()
    assert engine.totals["promoted_slots"] == FULL_BLOCKS


def test_a_full_disk_keeps_what_was_loaded_from_host_memory(make):
    engine = make(prompts=False, disk={"bytes": f"{65536 + 8192 * (2 * FULL_BLOCKS + 1)}B"})
    engine.serve("a", PROMPT, 1)
    engine.serve("b", OTHER, 1)
    assert engine.pool.reset_prefix_cache()
    engine.serve("a again", PROMPT, 1)
    assert engine.totals["hit_tokens"] > engine.totals["promoted_slots"] == 0
    engine.serve("c", [2, *PROMPT[1:]], 1)
    engine.forget()
    engine.serve("d", PROMPT, 1)
    assert engine.totals["demoted_slots"] == 3 * FULL_BLOCKS
    assert engine.totals["promoted_slots"] == FULL_BLOCKS


def test_what_is_read_while_everything_is_forgotten_is_not_served(engine):
    engine.disk.stuck = True
    ask(engine, "a")
    engine.change_weights()
    engine.offload.resets.weights_change()
    engine.disk.stuck = False
    engine.run()
    assert engine.totals["hit_tokens"] == 0
    assert engine.offload.gauges()["tier_slots_in_use"] > 0, "what was computed since"


def test_an_idle_engine_steps_until_all_is_written(make):
    engine = make(prompts=False)
    engine.disk.stuck = True
    engine.add("a", PROMPT, 1)
    engine.step(12, copies=True)
    assert not engine.scheduler.requests
    assert engine.offload.has_pending_work
    engine.disk.stuck = False
    engine.run()
    assert engine.totals["demoted_slots"] == FULL_BLOCKS
    assert not engine.offload.has_pending_work


def test_an_idle_engine_writes_what_has_become_worth_it(make, monkeypatch):
    engine = make(prompts=False, plugin={"eviction_policy": "auto"})
    worth = [False]
    monkeypatch.setattr(
        AutoPolicy, "should_demote", lambda policy, slots: np.full(len(slots), worth[0])
    )
    ask(engine, "a")
    engine.run()
    engine.rest()
    assert engine.totals["demoted_slots"] == 0
    worth[0] = True
    manager = engine.offload.manager
    manager.policy.use(np.array([*manager.readable_slots().values()], np.int32))
    assert engine.offload.has_pending_work
    engine.rest()
    assert engine.totals["demoted_slots"] == FULL_BLOCKS


def test_a_slot_that_one_rank_cannot_read_is_not_served(make):
    engine = make(ranks=2)
    assert engine.ranks[1].tier is not None
    engine.ranks[1].tier.faults["mismatch"] = 1
    ask(engine, "a")
    engine.run()
    assert engine.totals["promoted_slots"] == FULL_BLOCKS - 1
    assert engine.totals["lost_tier_slots"] == 1


@pytest.mark.parametrize("refuses", [0, 1])
def test_what_one_rank_never_read_is_not_served_whatever_another_tells(make, refuses):
    """One rank refuses the read, the other fails a part of it: nothing of it is on both."""
    engine = make(ranks=2)
    tiers = [rank.tier for rank in engine.ranks if rank.tier is not None]
    tiers[refuses].faults["submit"] = 1
    tiers[1 - refuses].faults["mismatch"] = 1
    ask(engine, "a")
    engine.run()  # compares what is readable with its key
    assert engine.totals["promoted_slots"] == 0
    assert engine.totals["lost_tier_slots"] == FULL_BLOCKS


def test_what_came_later_is_not_hidden_by_what_was_offered(engine):
    """Host memory has a part, which was offered while the rest was read."""
    ask(engine, "part", prompt=PROMPT[:9])
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.totals.clear()
    engine.disk.stuck = True
    ask(engine, "a")
    tracked = engine.offload._requests.get("a")
    assert tracked is not None
    hit = engine.offload._lookups.find(tracked, 0)
    assert hit is not None
    assert hit.tokens == 2 * 4
    engine.disk.stuck = False
    engine.run()
    assert engine.totals["hit_tokens"] == FULL_BLOCKS * 4


def write(engine: DiskEngine) -> None:
    """Have all requests end while writes are under way, and others have not begun."""
    engine.disk.stuck = True
    engine.add("written", [1, *PROMPT], 1)
    engine.step(12, copies=True)
    assert not engine.scheduler.requests
    assert engine.running(TierDirection.DEMOTE)
    assert engine.scheduler.has_requests()


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_waits_for_no_write(engine, state):
    """vLLM completes a pause, and a sleep, once the engine steps no more."""
    write(engine)
    engine.scheduler.set_pause_state(state)
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.scheduler.has_requests()


def test_the_end_of_an_engine_waits_for_no_write(make):
    """vLLM's core ends once it has nothing to step for; after 5 s it is killed."""
    core = object.__new__(EngineCoreProc)
    core.shutdown_state = EngineShutdownState.RUNNING

    def build_scheduler(self: EngineCoreProc) -> DiskEngine:
        return make()

    engine = build_scheduler(core)
    write(engine)
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert not engine.scheduler.has_requests()


def test_an_idle_engine_begins_no_write_after_its_time_and_ends_those_under_way(
    now, engine, monkeypatch
):
    monkeypatch.setattr(demoter, "MAX_RUNNING_SHARE", 16)
    begin_writes(engine, monkeypatch, at_once=4)
    now[0] += lower.IDLE_SECONDS
    for left in range(3, -1, -1):
        assert engine.offload.has_pending_work
        engine.disk.run(0)
        engine.step(2)
        assert len(engine.disk.submitted) == left
    assert not engine.offload.has_pending_work


def test_what_is_read_twice_since_host_memory_was_emptied_ends_twice(engine):
    engine.disk.stuck = True
    ask(engine, "a")
    engine.forget()
    ask(engine, "b")
    assert len(engine.running(TierDirection.PROMOTE)) == 2 * FULL_BLOCKS
    engine.disk.run(0)
    engine.step(2)
    assert "b" not in engine.answers, "it waits for the second"
    engine.offload.check_integrity()
    engine.disk.stuck = False
    engine.run()
    assert engine.offload.gauges()["promoting_slots"] == 0
    assert engine.totals["hook_errors"] == 0
    assert engine.totals["hit_tokens"] > 0


def test_a_request_that_waits_for_room_is_not_looked_up_in_every_step(now, engine):
    engine.disk.stuck = True
    ask(engine, "a")
    tracked = engine.offload._requests.get("a")
    assert tracked is not None
    now[0] += promoter.MAX_WAIT_SECONDS
    engine.disk.stuck = False
    worker = engine.ranks[0].connector.offload_worker
    worker.poll()
    engine.offload.apply_report(worker.ended())
    hits = []
    for _ in range(2):
        assert engine.offload.match(tracked.request, 0)[0] == FULL_BLOCKS * 4
        hits.append(tracked.hit)
    assert hits[0] is hits[1] is not None


@pytest.mark.parametrize(
    ("hints", "read"), [({"load": False}, 0), ({"max_load_tokens": 9}, 2)], ids=["none", "some"]
)
def test_no_more_is_read_than_a_request_wishes_to_load(engine, hints, read):
    engine.serve("a", PROMPT, 1, extra_args={"kv_transfer_params": {"kv_offload": hints}})
    assert engine.totals["promoted_slots"] == read
    assert engine.totals["hit_tokens"] == 4 * read


@pytest.mark.parametrize("ends_well", [True, False], ids=["read", "damaged"])
def test_what_a_request_did_not_wait_for_is_retained_once_it_was_read(now, engine, ends_well):
    """It is computed meanwhile. Where the read fails, what gets the slots next is not retained."""
    engine.disk.stuck = True
    hints = {"kv_offload": {"retain_seconds": 600}}
    engine.add("a", PROMPT, 2, extra_args={"kv_transfer_params": hints})
    engine.step(3)
    now[0] += promoter.MAX_WAIT_SECONDS
    engine.run(40) if engine.scheduler.running else engine.step(8)
    assert "a" in engine.ended
    assert engine.totals["late_promotions"] == 1
    assert engine.offload.gauges()["retained_slots"] == 0
    engine.disk.faults["mismatch"] = 0 if ends_well else FULL_BLOCKS
    engine.disk.stuck = False
    engine.step(3)
    assert engine.offload.gauges()["retained_slots"] == (FULL_BLOCKS if ends_well else 0)
    engine.serve("b", [1, 1, *PROMPT], 1)
    assert engine.offload.gauges()["retained_slots"] == (FULL_BLOCKS if ends_well else 0)


def compute(engine: DiskEngine, prompt: list[int]) -> None:
    """Have the GPU compute a prompt, whatever the disk has."""
    hints = {"kv_offload": {"load": False}}
    engine.add("computed", prompt, 1, extra_args={"kv_transfer_params": hints})
    engine.step(8, copies=True)
    assert "computed" in engine.ended


def test_the_last_slot_of_a_request_is_not_read_alone(engine):
    """Its last token is computed anyway, and the rest of the slot with it."""
    prompt = PROMPT[: 4 * FULL_BLOCKS]
    compute(engine, prompt)
    engine.offload.manager.reset()
    engine.disk.stuck = True
    ask(engine, "a", prompt=prompt, steps=8)
    assert "a" in engine.ended
    assert not engine.running(TierDirection.PROMOTE)


def test_a_request_does_not_wait_for_its_last_slot_once_the_gpu_has_the_others(engine):
    prompt = PROMPT[: 4 * FULL_BLOCKS]
    engine.disk.stuck = True
    ask(engine, "a", prompt=prompt)
    assert len(engine.running(TierDirection.PROMOTE)) == FULL_BLOCKS
    compute(engine, prompt)
    engine.step(4)
    assert "a" in engine.ended
