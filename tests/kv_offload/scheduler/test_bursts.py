"""Many requests that share a prefix come at once: what one step looks up for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import CacheGroup
from kv_offload.tiers.promoter import MAX_WAIT_SECONDS
from tests.kv_offload.tiers.test_remote import RemoteEngine
from tests.kv_offload.tiers.test_tiers import DiskEngine
from tests.support.loads import set_synchronous_loads
from tests.support.manual_tier import manual_remote
from tests.support.played_engine import PlayedEngine

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("now")]

REQUESTS, BLOCKS, TOKENS = 24, 64, 4
DRAW = random.Random(0)
SHARED = [DRAW.randrange(2) for _ in range(BLOCKS * TOKENS)]
TAILS = [[*map(int, f"{i:06b}"), *[DRAW.randrange(2) for _ in range(9)]] for i in range(REQUESTS)]
KEYS_EACH = 8
"""A request may look up so many keys beyond what it shares: its own blocks, and whether some are
there at all."""

FULL = (CacheGroup(0, TOKENS),)
WINDOW = (CacheGroup(0, TOKENS), CacheGroup(1, TOKENS, window_tokens=6))

Make = Callable[..., PlayedEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds an engine that has computed the shared prefix, and no longer has it on the GPU.

    It is where the argument says: in host memory, on a disk, or in a store. All of host memory is
    not checked in every step, which takes long.
    """
    made: list[PlayedEngine] = []

    def one(where: str, groups: Sequence[CacheGroup] = FULL, **more: Any) -> PlayedEngine:
        more = {
            "groups": groups,
            "blocks": 16 * BLOCKS,
            "slots": 16 * BLOCKS,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 2 * REQUESTS,
            "max_model_len": 2048,
            "async_scheduling": True,
            "plugin": {"load_or_recompute": "always_load"},
            **more,
        }
        if where == "disk":
            engine: PlayedEngine = DiskEngine(
                tmp_path, prompts=False, disk={"bytes": "32MiB"}, **more
            )
        else:
            engine = RemoteEngine(**more) if where == "store" else PlayedEngine(**more)
        made.append(engine)
        engine.check_host_memory = lambda: None  # type: ignore[method-assign]
        set_synchronous_loads(engine.offload, False)
        engine.serve("first", [*SHARED, 1, 1, 1, 1, 1], 1)
        engine.run()
        if where == "store":  # another engine has stored it
            made.append(RemoteEngine(**more))
            made[-1].check_host_memory = lambda: None  # type: ignore[method-assign]
            set_synchronous_loads(made[-1].offload, False)
            return made[-1]
        if where == "disk":
            engine.offload.manager.reset()
        assert engine.scheduler.reset_prefix_cache()
        return engine

    with manual_remote():
        yield one
        for engine in made:
            engine.rest()
            engine.connector.shutdown()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []

    def count(name: str) -> None:
        original = getattr(CacheManager, name)

        def counted(manager: CacheManager, found: Any) -> Any:
            counts.append(len(found) if name == "find" or name == "readable" else 1)
            return original(manager, found)

        monkeypatch.setattr(CacheManager, name, counted)

    for name in ("find", "readable", "__contains__"):
        count(name)
    return counts


def burst(engine: PlayedEngine, tails: Sequence[list[int]] = TAILS) -> None:
    for index, tail in enumerate(tails):
        engine.add(f"{index}", [*SHARED, *tail], 2)


def hold(engine: PlayedEngine, *, stuck: bool = True) -> None:
    tier = engine.ranks[0].tier
    if tier is not None:
        tier.stuck = stuck


def limit_lookups(engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each step look one request up."""
    lookups = engine.offload._lookups
    monkeypatch.setattr(lookups, "next_step", lambda: setattr(lookups, "_keys_left", 1))
    lookups.next_step()


def looked_up(engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    match = engine.offload.match

    def named(request: Any, *others: Any, **more: Any) -> Any:
        names.append(request.request_id)
        return match(request, *others, **more)

    monkeypatch.setattr(engine.offload, "match", named)
    return names


@pytest.mark.parametrize("where", ["host", "disk", "store"])
def test_a_request_that_waits_is_not_looked_up_again_before_what_it_waits_for_has_come(
    make, monkeypatch, where
):
    engine = make(where)
    hold(engine)
    names = looked_up(engine, monkeypatch)
    burst(engine)
    engine.step(2)  # a store answers after the first one
    first = len(names)
    assert {*names} == {f"{i}" for i in range(REQUESTS)}
    engine.step(2)
    assert len(names) == first
    hold(engine, stuck=False)
    engine.run()
    assert len(names) > first, "what they wait for has come"
    assert {*engine.ended} >= {f"{i}" for i in range(REQUESTS)}


@pytest.mark.parametrize("where", ["host", "disk", "store"])
def test_the_engine_does_not_look_its_own_blocks_up_for_requests_that_wait(
    make, monkeypatch, where
):
    """The engine has the prefix, and looks all of it up for each request, before it asks us."""
    engine = make(where)
    engine.serve("has it", [*SHARED, *TAILS[0]], 1)
    hold(engine)
    coordinator, lookups = engine.scheduler.kv_cache_manager.coordinator, []
    find = coordinator.find_longest_cache_hit
    monkeypatch.setattr(
        coordinator, "find_longest_cache_hit", lambda *of: lookups.append(of) or find(*of)
    )
    limit_lookups(engine, monkeypatch)
    for index, tail in enumerate(TAILS):
        engine.add(f"{index}", [*SHARED, *tail, *tail], 1)
    for _ in range(3):
        engine.step(1)
        assert len(lookups) <= 2, "one that may be looked up, and the next that may not"
        lookups.clear()
    monkeypatch.undo()
    engine.offload._lookups.next_step()
    hold(engine, stuck=False)
    engine.run()
    assert {*engine.ended} >= {f"{i}" for i in range(REQUESTS)}


def test_the_engine_does_not_look_its_own_blocks_up_for_requests_whose_loads_stand_in_line(
    make, monkeypatch
):
    """The engine has the prefix, and host memory what each request has after it."""
    engine = make("host")
    monkeypatch.setattr("kv_offload.scheduler.loads.admissions.MAX_LOADS", 2)
    prompts = [[*SHARED, 100 + index, *tail] for index, tail in enumerate(TAILS)]
    for index, prompt in enumerate(prompts):
        engine.serve(f"stored {index}", prompt, 1)
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("has the prefix", [*SHARED, 1], 1)
    hits = engine.totals["hit_tokens"]
    coordinator, lookups = engine.scheduler.kv_cache_manager.coordinator, []
    find = coordinator.find_longest_cache_hit
    monkeypatch.setattr(
        coordinator, "find_longest_cache_hit", lambda *of: lookups.append(of) or find(*of)
    )
    for index, prompt in enumerate(prompts):
        engine.add(f"{index}", prompt, 1)
    engine.step(1)
    assert engine.offload.gauges()["running_loads"] == 2
    lookups.clear()
    engine.step(3)
    assert not lookups
    engine.run_copies()
    engine.step(2)
    assert len(lookups) == 2, "those whose turn it is"
    engine.run()
    assert engine.totals["hit_tokens"] - hits == REQUESTS * 16


def test_a_request_that_is_not_to_load_does_not_wait_for_the_lookups_of_others(make, monkeypatch):
    engine = make("host")
    limit_lookups(engine, monkeypatch)
    for index, tail in enumerate(TAILS):
        engine.add(f"{index}", [*tail, *SHARED], 2)
    hints = {"kv_transfer_params": {"kv_offload": {"load": False}}}
    request = engine.add("computes", TAILS[0], 1, extra_args=hints)
    engine.step(1)
    assert request.num_computed_tokens
    monkeypatch.undo()
    engine.run()


@pytest.mark.parametrize("groups", [FULL, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("where", ["host", "disk", "store"])
def test_a_prefix_is_looked_up_once_for_all_that_share_it(make, keys, where, groups):
    engine = make(where, groups)
    hold(engine)
    burst(engine)
    # The first one's own look-ups: of each group, here and below, once to find and once to read.
    once = 10 * len(groups) * BLOCKS
    del keys[:]
    engine.schedule()
    assert sum(keys) <= once + KEYS_EACH * REQUESTS < REQUESTS * BLOCKS
    engine.finish_steps()
    del keys[:]
    engine.schedule()
    assert sum(keys) <= KEYS_EACH * REQUESTS, "they wait"
    hold(engine, stuck=False)
    engine.finish_steps()
    for _ in range(6):  # the read ends, the load begins; its copy does not run
        del keys[:]
        engine.schedule()
        assert sum(keys) <= once + KEYS_EACH * REQUESTS
        engine.finish_steps()
    engine.run()
    assert engine.ended.keys() >= {f"{i}" for i in range(REQUESTS)}
    assert engine.totals["hit_tokens"] >= len(SHARED)


def test_a_store_is_asked_once_for_what_is_shared(make):
    engine = make("store")
    assert isinstance(engine, RemoteEngine)
    directory = engine.directory
    directory.stuck = True
    asked: list[bytes] = []
    ask = directory.ask
    directory.ask = (  # type: ignore[method-assign]
        lambda question: asked.extend(question.names) or ask(question)
    )
    burst(engine)
    engine.step(2)
    assert len(asked) == len({*asked}), "a name is asked for twice"
    assert len(asked) >= BLOCKS
    directory.stuck = False
    directory.answer()
    engine.run()
    assert engine.totals["promoted_slots"] == BLOCKS


def test_of_what_only_one_of_them_has_on_the_disk_the_read_begins_at_once(make):
    engine = make("disk")
    assert isinstance(engine, DiskEngine)
    own = [*TAILS[0], 1, 0, 1, 1, 0, 0, 1]
    engine.serve("own", [*SHARED, *own], 1)
    engine.forget()
    engine.totals.clear()
    hold(engine)
    burst(engine, [TAILS[1], own, TAILS[2]])
    engine.step(1)
    hold(engine, stuck=False)
    promoted = sum(len(job.pairs) for job in engine.disk.submitted)
    assert promoted == BLOCKS + len(own) // TOKENS
    engine.run()
    assert engine.totals["promoted_slots"] == promoted


@pytest.mark.parametrize("where", ["host", "disk", "store"])
@pytest.mark.parametrize(
    "event", ["fails", "first ends", "all but the last end", "time is over", "reset", "preempted"]
)
def test_whatever_becomes_of_the_first_the_others_are_served(make, now, where, event):
    engine = make(where)
    hold(engine)
    burst(engine)
    engine.step(2)
    assert not engine.answers.keys() & {f"{i}" for i in range(REQUESTS)}, "they do not wait"
    if event == "fails":
        if where == "host":
            engine.run_copies(Direction.LOAD, fail=True)
        else:
            engine.ranks[0].tier.faults["error"] = BLOCKS // 2
    elif event == "first ends":
        engine.abort("0")
    elif event == "all but the last end":
        engine.abort(*map(str, range(REQUESTS - 1)))
    elif event == "time is over":
        now[0] += MAX_WAIT_SECONDS + 1
        engine.step(4, copies=where != "host")
        if where == "host":
            assert engine.offload.gauges()["running_loads"] > 1
        else:
            assert engine.answers.keys() & {f"{i}" for i in range(REQUESTS)}
    elif event == "reset":
        engine.offload.resets.reset_cache()
    else:
        hold(engine, stuck=False)
        while not engine.scheduler.running:
            engine.step(copies=True)
        hold(engine)
        assert engine.reset(reset_running_requests=True)
    hold(engine, stuck=False)
    engine.run()
    gone = {"first ends": 1, "all but the last end": REQUESTS - 1}.get(event, 0)
    served = {name for name, reason in engine.ended.items() if reason == "length"}
    assert served >= {f"{i}" for i in range(gone, REQUESTS)}


def test_those_that_share_nothing_are_all_served_though_a_step_looks_up_few(make, monkeypatch):
    engine = make("disk")
    prompts = [[*map(int, f"{i:06b}"), *SHARED[i:120]] for i in range(12)]
    for index, prompt in enumerate(prompts):
        engine.serve(f"before {index}", prompt, 1)
    engine.forget()
    engine.totals.clear()
    limit_lookups(engine, monkeypatch)
    hold(engine)
    for index, prompt in enumerate(prompts):
        engine.add(f"{index}", prompt, 2)
    read = []
    for _ in range(4):
        before = len(engine.disk.submitted)
        engine.step(1)
        read.append(len(engine.disk.submitted) - before)
    assert read == [1, 1, 1, 1], "a step looks one of them up, in the order in which they came"
    hold(engine, stuck=False)
    engine.run()
    assert engine.ended.keys() >= {f"{i}" for i in range(12)}
    assert engine.totals["hit_tokens"] >= 12 * 100


def test_those_whose_reads_end_together_are_looked_up_step_by_step(make, monkeypatch, keys):
    engine = make("disk")
    prompts = [[*map(int, f"{i:06b}"), *SHARED[i:120]] for i in range(12)]
    for index, prompt in enumerate(prompts):
        engine.serve(f"before {index}", prompt, 1)
    engine.forget()
    hold(engine)
    for index, prompt in enumerate(prompts):
        engine.add(f"{index}", prompt, 2)
    engine.step(4)
    assert len(engine.disk.submitted) == 12
    limit_lookups(engine, monkeypatch)
    hold(engine, stuck=False)
    engine.step(copies=True)  # the reads end
    counts = []
    for _ in range(12):
        keys.clear()
        engine.step(copies=True)
        counts.append(sum(keys))
    assert 0 < max(counts) < 240, (
        "of two requests at most, each of whose blocks is sought four times"
    )
    engine.run()
    assert engine.totals["hit_tokens"] >= 12 * 100
