"""Whatever an engine does, the next one finds only whole blocks, computed with its own weights.

vLLM's scheduler and both sides of the connector are real (`PlayedEngine`). After each part of a
step, and each copy of a rank, the directory is read as the next engine would read it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kv_offload.cache.directory import read_directory
from kv_offload.cache.peer_slots import PeerSlots
from kv_offload.config.host_memory import HostMemory
from kv_offload.engines.vllm.start import ranks
from kv_offload.errors import CapacityError, UnsupportedError
from kv_offload.messages import WorkerCapacity
from kv_offload.worker import capacity, pool
from tests.support.loads import set_synchronous_loads
from tests.support.manual_copies import ManualWindows
from tests.support.played_engine import PlayedEngine
from tests.support.played_rank import PlayedExecutor
from tests.support.slow import rest_is_slow

PREFIXES = [[seed * 7 + token for token in range(20)] for seed in range(1, 6)]


ARENAS: dict[str, np.ndarray] = {}
"""The slots of all pooled engines, by the paths of their arenas."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines do not wait for the seat of another, which does not end."""
    monkeypatch.setattr(pool, "LOCK_SECONDS", 0.0)


class PooledEngine(PlayedEngine):
    """A played engine in a pool. Its arenas are not in the pool's files: `copies.arena` is read."""

    def __init__(self, folder: Path, *, more: Mapping[str, Any] = {}, **arguments: Any) -> None:
        plugin = {"host_pool": "chat", "host_pool_path": str(folder), **more}
        given: dict[Any, list[Any]] = {}

        def gather(value: Any) -> list[Any]:
            """Return the values of the ranks built so far, including this one."""
            kind = isinstance(value, bool) or isinstance(value[1], HostMemory), type(value)
            given.setdefault(kind, []).append(value)
            return given[kind]

        folder.mkdir(exist_ok=True)
        with mock.patch.object(ranks, "gather_over_ranks", gather):
            super().__init__(plugin=plugin, **arguments)
        workers = [rank.connector.offload_worker for rank in self.ranks]
        self.seat = Path(workers[0]._arena).parent
        for rank, worker in zip(self.ranks, workers, strict=True):
            ARENAS[worker._arena] = rank.copies.arena
            rank.copies.windows = worker._peers.windows = ManualWindows(ARENAS)
        self.of_first_weights: dict[bytes, Any] = {}
        self.seen = 0

    def check_directory(self) -> None:
        """Check each entry on every rank, as if the engine had been killed now."""
        self._learn_keys()
        if not self.model.weights:
            self.of_first_weights.update(self.known)
        read = read_directory(self.seat)
        assert read is not None
        slots, keys = read[0].tolist(), read[1]
        for rank, played in enumerate(self.ranks):
            contents = [played.copies.arena[slot] for slot in slots]
            known = [self.of_first_weights[key] for key in keys]
            self.check_blocks(rank, zip(known, contents, strict=True))
        self.seen += len(slots)

    def adopt(self, before: PooledEngine) -> None:
        """Give the arenas the bytes of an engine that was killed."""
        for own, others in zip(self.ranks, before.ranks, strict=True):
            own.copies.arena[:] = others.copies.arena
        self.known.update(before.known)


class PooledEngineOfMergedRanks(PooledEngine):
    """Its ranks share one entry in vLLM's handshake, as in prefill context parallelism."""

    @property
    def model_executor(self) -> PlayedExecutor:
        executor = super().model_executor
        last = executor.get_kv_connector_handshake_metadata()[-1]
        executor.get_kv_connector_handshake_metadata = lambda: [last]
        return executor


def act(engine: PooledEngine, chance: random.Random, number: int) -> None:
    """Perform a random action of an engine, its ranks or its users."""
    choice = chance.random()
    if choice < 0.12:
        prefix = chance.choice(PREFIXES)
        tail = [chance.randrange(50) for _ in range(chance.randrange(1, 6))]
        engine.add(f"r{number}", prefix[: chance.randrange(4, 21)] + tail)
    elif choice < 0.32:
        if engine.under_way < engine.max_steps_under_way:
            engine.schedule()
    elif choice < 0.5:
        if engine.scheduled:
            engine.execute()
    elif choice < 0.68:
        if engine.executed:
            engine.process()
    else:
        copies = chance.choice(engine.ranks).copies
        if copies.submitted:
            copies.run(chance.randrange(len(copies.submitted)), fail=chance.random() < 0.1)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", rest_is_slow(range(4), 2))
def test_at_each_moment_the_directory_is_true(
    memory_folder: Path, seed: int, num_ranks: int, asynchronous: bool
) -> None:
    """New weights arrive in the middle; blocks computed afterwards must not be found."""
    chance = random.Random(100 * seed + 10 * num_ranks + asynchronous)
    engine = PooledEngine(
        memory_folder, slots=12, blocks=30, ranks=num_ranks, async_scheduling=asynchronous
    )
    engine.may_fail = True
    for number in range(400):
        act(engine, chance, number)
        engine.check_directory()
    assert engine.seen > 200
    assert engine.offload.manager.evictions > 0
    engine.finish_steps()
    engine.core.collective_rpc("update_weights")
    assert engine.reset(reset_running_requests=True, reset_connector=True)
    for number in range(400, 500):
        act(engine, chance, number)
        engine.check_directory()
    engine.run()
    assert engine.offload.manager.readable_slots()
    read = read_directory(engine.seat)
    assert read is not None
    assert read[1] == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_next_engine_loads_what_was_left(memory_folder: Path, num_ranks: int) -> None:
    """The copy of the folder is what `kill -9` leaves: its locks are free."""
    first = PooledEngine(memory_folder / "first", slots=30, ranks=num_ranks)
    for number, prefix in enumerate(PREFIXES[:3]):
        first.serve(f"r{number}", prefix)
    left = len(first.offload.manager.readable_slots())
    assert left >= 15
    shutil.copytree(memory_folder / "first", memory_folder / "second")
    second = PooledEngine(memory_folder / "second", slots=30, ranks=num_ranks)
    second.adopt(first)
    assert second.offload.gauges()["adopted_slots"] == left
    for number, prefix in enumerate(PREFIXES[:3]):
        second.serve(f"r{number}", prefix)
    assert second.totals["hit_tokens"] == 3 * 20
    second.rest()


def test_a_start_that_is_refused_leaves_its_seat(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(capacity, "read_available_memory", lambda: HostMemory(0, "a test"))
        with pytest.raises(CapacityError, match="available now"):
            PooledEngine(memory_folder, slots=30)
    PooledEngine(memory_folder, slots=30)
    assert len([*memory_folder.glob("kv-offload-*/chat/seat-*")]) == 1


def test_ranks_that_the_handshake_leaves_out_are_asked(memory_folder: Path) -> None:
    engine = PooledEngineOfMergedRanks(memory_folder, slots=30, ranks=2)
    header = (engine.seat / "directory").read_bytes()[:1000]
    for rank in range(2):
        assert b"rank-%d." % rank in header
    engine.serve("r", PREFIXES[0])
    engine.offload.manager.check_integrity()
    assert engine.offload.manager.readable_slots()


def test_a_pool_is_not_opened_for_some_of_the_ranks(memory_folder: Path) -> None:
    engine = PooledEngine(memory_folder, slots=30, ranks=2, handshake=False)
    arena = str(engine.seat / "rank-1.kind.token")
    with pytest.raises(UnsupportedError, match=r"of 2 ranks only \[1\] have reported"):
        engine.offload.take_capacities([WorkerCapacity(1, 30, 30, arena=arena)])
    assert not (engine.seat / "directory").exists()


def test_what_was_adopted_is_announced_and_with_its_tokens_once_it_is_loaded(memory_folder):
    before = PooledEngine(memory_folder / "first", slots=30, events=True)
    for number, prefix in enumerate(PREFIXES):
        before.serve(f"r{number}", prefix)
    left = before.blocks_in_memory()
    shutil.copytree(memory_folder / "first", memory_folder / "second")
    engine = PooledEngine(memory_folder / "second", slots=30, events=True)
    engine.adopt(before)
    (router, _) = engine.routers
    engine.serve("again", PREFIXES[0])
    assert engine.totals["hit_tokens"] == 20
    assert left <= router.in_memory == engine.blocks_in_memory()
    assert len(left - router.without_tokens) == 5
    engine.rest()


def test_what_was_adopted_is_known_again_before_its_children_after_a_reset(memory_folder):
    """The reset ends the store of a block whose parent was adopted; one router forgets both."""
    before = PooledEngine(memory_folder / "first", slots=30, events=True)
    before.serve("stored", PREFIXES[0])
    shutil.copytree(memory_folder / "first", memory_folder / "second")
    engine = PooledEngine(memory_folder / "second", slots=30, events=True)
    engine.adopt(before)
    hints = {"kv_transfer_params": {"kv_offload": {"load": False}}}
    engine.add("computes", [*PREFIXES[0], *PREFIXES[1][:5]], 1, extra_args=hints)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    engine.step()
    assert engine.offload.gauges()["running_stores"] == 1
    assert engine.reset()
    engine.rest()
    assert engine.routers[0].in_memory == engine.blocks_in_memory() > before.blocks_in_memory()


def meet(*engines: PooledEngine) -> None:
    """Make engines find each other, and map each other's arenas."""
    for engine in engines:
        engine.offload.manager.peers.directories.refresh()
        for _ in range(4):
            engine.schedule()
            engine.finish_steps()


def pooled(folder: Path, count: int, **arguments: Any) -> list[PooledEngine]:
    engines = [PooledEngine(folder, **arguments) for _ in range(count)]
    meet(*engines)
    return engines


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_loads_straight_from_the_slots_of_another(
    memory_folder: Path, num_ranks: int
) -> None:
    owner, engine = pooled(memory_folder, 2, slots=30, ranks=num_ranks)
    for number, prefix in enumerate(PREFIXES[:3]):
        owner.serve(f"r{number}", prefix)
    for number, prefix in enumerate(PREFIXES[:3]):
        engine.serve(f"r{number}", prefix)
    assert engine.totals["hit_tokens"] == 3 * 20
    assert engine.totals["peers_read_bytes"] == engine.totals["loaded_bytes"] > 0
    assert engine.totals["promoted_bytes"] == engine.totals["stored_slots"] == 0
    assert engine.offload.manager.slots_in_use == 0
    assert engine.offload.manager.peers.num_leases == 0
    engine.rest()
    for rank in owner.ranks:
        rank.copies.arena[:] ^= 0x40
    with pytest.raises(AssertionError):
        engine.serve("again", PREFIXES[0])


def test_those_that_share_what_is_loaded_from_a_peer_are_looked_up_in_no_block(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, engine = pooled(memory_folder, 2, slots=30)
    owner.serve("first", PREFIXES[0], 1)
    set_synchronous_loads(engine.offload, False)
    look_up, asked = PeerSlots.look_up, []

    def count(peers: PeerSlots, keys: list[bytes]) -> Any:
        asked.append(len(keys))
        return look_up(peers, keys)

    monkeypatch.setattr(PeerSlots, "look_up", count)
    for number in range(8):
        engine.add(f"{number}", [*PREFIXES[0], number], 1)
    engine.step(1)
    assert asked == [len(PREFIXES[0]) // 4]
    engine.run()
    assert engine.totals["peers_read_bytes"] > 0
    assert not engine.totals["hook_errors"]
    assert len(engine.answers) == 8


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", rest_is_slow(range(4), 2))
def test_engines_that_load_from_each_other_answer_right(
    memory_folder: Path, seed: int, asynchronous: bool
) -> None:
    """Whatever they evict meanwhile; copies fail at random, and one is reset and no longer read."""
    chance = random.Random(seed)
    more = {"max_share_per_salt": 0.9} if seed % 2 else {}
    engines = pooled(
        memory_folder, 3, slots=12, blocks=30, async_scheduling=asynchronous, more=more
    )
    for engine in engines:
        engine.may_fail = True
    for number in range(1500):
        engine = chance.choice(engines)
        act(engine, chance, number)
        engine.offload.check_integrity()
        if number == 1000:
            engines[0].finish_steps()
            assert engines[0].reset(reset_running_requests=True, reset_connector=True)
        if number % 100 == 0:
            for engine in engines:
                engine.offload.manager.peers.directories.refresh()
    for engine in engines:
        engine.run()
        assert engine.offload.manager.peers.num_leases == 0
        assert engine.totals["peers_read_bytes"] > 0
        assert more or engine.offload.manager.evictions > 0
        assert not engine.totals["hook_errors"]
    for engine in engines:
        directory = engine.offload.manager.directory
        assert not directory.are_leased(np.arange(12, dtype=np.int32)).any()


def test_what_was_planned_is_sent_although_peers_cannot_be_mapped(memory_folder: Path) -> None:
    engine = PooledEngine(memory_folder, slots=30)

    def fail(_: Any) -> Any:
        raise RuntimeError("no windows")

    engine.offload._subscribers.plans.append(fail)
    engine.serve("stored", PREFIXES[0])
    engine.rest()
    assert engine.totals["hook_errors"] > 0
    assert engine.totals["stored_slots"] > 0
    assert engine.offload.manager.slots_in_use == engine.totals["stored_slots"]
