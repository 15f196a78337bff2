"""What routers are told of host memory, on vLLM's own scheduler.

After every step the played engine compares what two routers know with what host memory has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.scheduler.events import announcer
from kv_offload.scheduler.transfers import Kind, Transfer
from tests.support.played_cases import CHUNKS, FULL, OTHER, PROMPT, STATE, WINDOW, both_ways
from tests.support.played_engine import PlayedEngine
from tests.support.remote_connector import multi_config
from tests.support.router import DynamoIndex, LlmdIndex

pytestmark = pytest.mark.engine


class FollowedEngine(PlayedEngine):
    """An engine whose events are kept, too."""

    def __init__(self, *groups: CacheGroup, **arguments: Any) -> None:
        self.batches: list[list[Any]] = []
        super().__init__(groups or (FULL,), events=True, **arguments)

    def _publish(self, batch: Any) -> None:
        self.batches.append(batch.events)
        super()._publish(batch)

    def told(self, kind: type) -> list[Any]:
        events = (event for batch in self.batches for event in batch)
        return [e for e in events if isinstance(e, kind) and getattr(e, "medium", "") == "CPU"]

    @property
    def routed(self) -> set[Any]:
        first, second = self.routers
        assert first.in_memory == second.in_memory
        return first.in_memory


def hashes(events: list[Any]) -> list[Any]:
    return [block_hash for event in events for block_hash in event.block_hashes]


GROUPS = {
    "one": (FULL,),
    "window": (FULL, WINDOW),
    "state": (FULL, STATE),
    "chunks": (FULL, CHUNKS),
    "sizes": (CacheGroup(0, 8), CacheGroup(1, 4, 6)),
}


@both_ways
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_what_is_stored_is_told(groups):
    engine = FollowedEngine(*groups)
    engine.serve("a", PROMPT, 1)
    engine.serve("b", [*PROMPT[:12], *OTHER[:9]], 1)
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed) >= 6
    stored = engine.told(BlockStored)
    assert sorted(hashes(stored)) == sorted(h for _, h in engine.routed), "told twice"
    assert {event.group_idx for event in stored} == set(range(len(groups)))


def test_a_block_is_told_as_the_engine_told_it_of_the_gpu():
    """Parent, tokens, block size, kind of layers and what else is in the hash are the same."""
    engine = FollowedEngine()
    request = engine.add("a", PROMPT, 1)
    request.cache_salt = "tenant"
    request.block_hashes.clear()
    request.update_block_hashes()
    engine.run()
    on_gpu = [e for b in engine.batches for e in b if getattr(e, "medium", "") == "GPU"]

    def by_block(event: Any) -> dict[Any, tuple[Any, ...]]:
        size, parents = event.block_size, [event.parent_block_hash, *event.block_hashes]
        same = (size, event.group_idx, event.kv_cache_spec_kind, event.lora_id, event.lora_name)
        return {
            block_hash: (
                *same,
                parents[index],
                list(event.token_ids[index * size : (index + 1) * size]),
                event.extra_keys[index],
            )
            for index, block_hash in enumerate(event.block_hashes)
        }

    expected = {key: value for event in on_gpu for key, value in by_block(event).items()}
    told = engine.told(BlockStored)
    assert {key: value for event in told for key, value in by_block(event).items()} == expected
    assert len(expected) == 5
    assert [keys for *_, keys in expected.values()] == [("tenant",), None, None, None, None]


@both_ways
def test_what_is_evicted_is_told():
    engine = FollowedEngine(slots=6)
    for name, prompt in {"a": PROMPT, "b": OTHER, "c": PROMPT, "d": [1, *OTHER]}.items():
        engine.serve(name, prompt, 1)
        assert engine.routed == engine.blocks_in_memory()
    assert len(engine.told(BlockRemoved)) > 0


def split_stores(engine: FollowedEngine) -> Any:
    """Compute a prompt in two steps; return the copies, with the store of each step running."""
    engine.add("a", PROMPT, 1)
    engine.step(3)
    (rank,) = engine.ranks
    assert len(rank.copies.submitted) == 2
    return rank.copies


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_is_told_after_the_one_that_it_continues(fails):
    """The store of the end of a prompt ends before that of its beginning, which may fail."""
    engine = FollowedEngine()
    copies = split_stores(engine)
    copies.run(1)
    engine.step(2)
    (end,) = engine.blocks_in_memory()
    assert not engine.routed
    assert engine.offload.has_pending_work
    copies.run(0, fail=fails)
    engine.run()
    assert end in engine.routed
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed) == (1 if fails else 5)


def test_a_block_that_is_gone_before_its_turn_is_not_told():
    engine = FollowedEngine()
    copies = split_stores(engine)
    copies.run(1)
    engine.step(2)
    engine.offload.manager.reset()
    engine.run()
    assert engine.routed == engine.blocks_in_memory() == set()
    assert hashes(engine.told(BlockStored)) == []


def test_a_reset_of_host_memory_alone_removes_block_by_block():
    engine = FollowedEngine()
    engine.serve("a", PROMPT, 1)
    before = engine.routed.copy()
    engine.batches.clear()
    engine.offload.resets.reset_cache()
    assert engine.scheduler.has_requests(), "an idle engine would tell nobody"
    engine.run()
    assert engine.routed == set()
    (removed,) = engine.told(BlockRemoved)
    assert {(0, block_hash) for block_hash in removed.block_hashes} == before
    assert not any(isinstance(e, AllBlocksCleared) for batch in engine.batches for e in batch)


@pytest.mark.parametrize("reset_connector", [False, True])
def test_a_reset_of_the_engine_has_what_is_left_told_again(reset_connector):
    """Its event makes routers forget all that the engine has, in host memory too."""
    engine = FollowedEngine()
    engine.serve("a", PROMPT, 1)
    engine.batches.clear()
    assert engine.reset(reset_connector=reset_connector)
    engine.run()
    assert isinstance(engine.batches[0][0], AllBlocksCleared)
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed) == (0 if reset_connector else 5)


def test_what_is_new_comes_after_what_is_told_again(monkeypatch):
    """A router that has forgotten the beginning of a prompt would drop its end."""
    monkeypatch.setattr(announcer, "MAX_STORED", 1)
    engine = FollowedEngine()
    for name, prompt in {"a": PROMPT, "b": OTHER, "c": OTHER[3:], "d": [1, *OTHER]}.items():
        engine.serve(name, prompt, 1)
    engine.offload.manager.forget(np.array([0], np.int32))
    for name, prompt in {"takes its place": [2, *OTHER], "has it again": PROMPT}.items():
        engine.serve(name, prompt, 1)
    before = engine.routed.copy()
    assert engine.reset()
    engine.serve("e", [*PROMPT[:20], 0, 0, 0, 0, 0], 1)
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed - before) == 1


def test_a_reset_begins_anew_what_is_told_again(monkeypatch):
    monkeypatch.setattr(announcer, "MAX_STORED", 1)
    engine = FollowedEngine()
    engine.serve("a", PROMPT, 1)
    for _ in range(2):
        assert engine.reset()
        engine.step(3)
    engine.run()
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed) == 5


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "MAX_STORED", 2)
    monkeypatch.setattr(announcer, "MAX_REMOVED", 3)


@pytest.mark.usefixtures("few")
def test_a_step_tells_of_so_many_blocks_at_most():
    engine = FollowedEngine()
    engine.serve("a", PROMPT, 1)
    engine.serve("b", OTHER, 1)
    assert len(engine.routed) == 10
    engine.offload.resets.reset_cache()
    engine.reset()
    engine.serve("c", OTHER, 1)
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed) == 5
    for batch in engine.batches:
        ours = [event for event in batch if getattr(event, "medium", "") == "CPU"]
        assert len(hashes([e for e in ours if isinstance(e, BlockStored)])) <= 2
        assert len(hashes([e for e in ours if isinstance(e, BlockRemoved)])) <= 3


def test_what_comes_from_a_disk_is_told_where_a_group_needs_none_of_it(tmp_path):
    """A hit that ends with a chunk: the next token's chunk begins there."""
    plugin = {"disk": {"path": str(tmp_path), "bytes": "1MiB", "keep_on_restart": False}}
    engine = FollowedEngine(FULL, CHUNKS, plugin=plugin)
    prompt = PROMPT[: 2 * 8 + 1]
    engine.serve("a", prompt, 1)
    engine.offload.manager.reset()
    assert engine.reset()
    engine.run()
    assert not engine.routed
    engine.serve("b", prompt, 1)
    assert engine.totals["promoted_slots"] == 4
    assert engine.totals["hit_tokens"] == 16
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed) == 4
    engine.connector.shutdown()


def on_disk(engine: FollowedEngine) -> set[Any]:
    first, second = engine.routers
    assert first.on_disk == second.on_disk
    return first.on_disk


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE)], ids=["one", "state"])
def test_what_a_disk_has_is_announced_as_it_was_of_host_memory(groups, tmp_path):
    """A disk of six slots evicts; what it has keeps its tokens when host memory has forgotten."""
    plugin = {"disk": {"path": str(tmp_path), "bytes": "1MiB", "keep_on_restart": False}}
    engine = FollowedEngine(*groups, plugin=plugin)
    engine.serve("a", PROMPT, 1)
    assert on_disk(engine) == engine.blocks_on_disk() == engine.blocks_in_memory()
    engine.offload.manager.reset()
    assert engine.reset()  # a router may forget all that it knows of the engine
    engine.run()
    assert not engine.routed
    assert on_disk(engine) == engine.blocks_on_disk()
    assert len(on_disk(engine)) >= 5
    assert not engine.routers[0].without_tokens
    disk: Any = engine.offload.tiers.tiers["disk"]
    gone = disk.manager.find([key for key, _ in [*disk.manager.readable_slots().items()][:2]])
    disk.manager.forget(gone)
    engine.serve("b", OTHER, 1)
    assert on_disk(engine) == engine.blocks_on_disk()
    engine.connector.shutdown()


def test_llm_d_and_dynamo_find_what_is_on_the_disk(tmp_path, monkeypatch):
    """Also after a restart: llm-d what any engine has announced, Dynamo what was used again."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    plugin = {"disk": {"path": str(tmp_path), "bytes": "1MiB"}}
    engine = FollowedEngine(plugin=plugin)
    engine.serve("a", PROMPT, 1)
    engine.serve("b", OTHER, 1)
    left, records = engine.blocks_on_disk(), engine.ranks[0].tier.records
    llm_d, dynamo = LlmdIndex(), DynamoIndex(4)

    def replay() -> None:
        for event in itertools.chain(*engine.batches):
            llm_d.hear(event)
            dynamo.hear(event)
        engine.batches.clear()

    replay()
    assert llm_d.blocks["storage"] == llm_d.blocks["cpu"] == left
    assert dynamo.blocks["disk"] == dynamo.blocks["host_pinned"] == left
    engine.connector.shutdown()
    for index in (llm_d, dynamo):
        index.blocks.clear()  # as routers do when an engine begins again
    engine = FollowedEngine(plugin=plugin)
    engine.ranks[0].tier.records = records
    engine.run()
    engine.serve("c", PROMPT, 1)
    replay()
    assert llm_d.blocks["storage"] == left
    assert dynamo.blocks["disk"] == dynamo.blocks["host_pinned"]
    assert len(dynamo.blocks["disk"]) == 5
    assert not dynamo.dropped
    engine.connector.shutdown()


@pytest.mark.parametrize("first", [True, False])
def test_events_come_through_a_multi_connector(first):
    engine = FollowedEngine(transfer_config=functools.partial(multi_config, first=first))
    engine.serve("a", PROMPT, 1)
    assert engine.routed == engine.blocks_in_memory()
    assert len(engine.routed) == 5


def test_nothing_is_kept_where_events_are_off():
    engine = PlayedEngine()
    engine.serve("a", PROMPT, 1)
    assert engine.offload.manager.changes is None
    assert engine.connector.take_events() == []


@pytest.mark.parametrize("ends_well", [True, False])
def test_what_is_held_back_behind_a_copy_that_hangs_makes_no_step_long(ends_well, monkeypatch):
    """A disk hangs while it reads the prefix of all prompts: 1,000 blocks come behind it."""
    group = CacheGroup(0, 4)
    manager = CacheManager(make_policy("lru", 1100))
    prefixes = PrefixMap([group], 4, lambda block_hash, _: block_hash)
    told = announcer.Announcer(manager, prefixes, lambda *_: None)
    hashes = [at.to_bytes(8) for at in range(1001)]
    request: Any = SimpleNamespace(block_hashes=hashes, all_token_ids=[1] * 4 * len(hashes))
    hanging = manager.prepare_store(hashes[:100])
    slots = np.concatenate((hanging, manager.prepare_store(hashes[100:])))
    told.promoted(request, 0, 4004, [Transfer(0, Kind.PROMOTE, slots, keys=hashes)])
    looked_up: list[bytes] = []
    slot_numbers = manager.slot_numbers

    def look(keys: Sequence[bytes]) -> list[int]:
        looked_up.extend(keys)
        return slot_numbers(keys)

    monkeypatch.setattr(manager, "slot_numbers", look)
    # Each second one later, so that each is held back for itself.
    for slot in [*slots[101::2].tolist(), *slots[100::2].tolist()]:
        looked_up.clear()
        manager.complete_store(np.array([slot], np.int32))
        assert told.take() == []
        assert len(looked_up) <= 800
    manager.complete_store(hanging, ok=ends_well)
    found: list[bytes] = []
    for _ in range(8):
        found += [one for news in told.take() for one in news.hashes]
    assert found == hashes[0 if ends_well else 100 :]
    assert not told.held_back
    assert not told.has_more


@pytest.mark.parametrize("ends_well", [True, False])
def test_no_step_tells_all_that_waited_behind_one_block(ends_well):
    """A disk hangs while it reads what 500 prompts begin with; each has stored 10 blocks more."""
    tail, beginning = 10, [at.to_bytes(8) for at in range(10)]
    manager = CacheManager(make_policy("lru", 5010))
    prefixes = PrefixMap([CacheGroup(0, 4)], 4, lambda block_hash, _: block_hash)
    told = announcer.Announcer(manager, prefixes, lambda *_: None)
    hanging = manager.prepare_store(beginning)
    behind = [at.to_bytes(8) for at in range(10, 5010)]
    for first in range(0, len(behind), tail):
        own = behind[first : first + tail]
        hashes = beginning + own
        request: Any = SimpleNamespace(block_hashes=hashes, all_token_ids=[1] * 4 * len(hashes))
        stored = manager.prepare_store(own)
        move = Transfer(0, Kind.PROMOTE, np.concatenate((hanging, stored)), keys=hashes)
        told.promoted(request, 0, 4 * len(hashes), [move])
        manager.complete_store(stored)
        assert told.take() == []
    manager.complete_store(hanging, ok=ends_well)
    found: list[bytes] = []
    while told.has_more:
        news = [one for part in told.take() for one in part.hashes]
        assert len(news) <= announcer.MAX_STORED + tail
        found += news
    assert found == [*(beginning if ends_well else []), *behind]
    assert not told.held_back


def test_a_block_in_a_new_slot_stays_known_to_its_children(monkeypatch):
    """The turn of its new slot's earlier block comes before the removal of its old slot."""
    monkeypatch.setattr(announcer, "MAX_STORED", 1)
    manager = CacheManager(make_policy("lru", 2))
    prefixes = PrefixMap([CacheGroup(0, 4)], 4, lambda block_hash, _: block_hash)
    told = announcer.Announcer(manager, prefixes, lambda *_: None)
    known: set[bytes] = set()

    def store(*prompt: bytes) -> int:
        request: Any = SimpleNamespace(block_hashes=prompt, all_token_ids=[1] * 4 * len(prompt))
        slots = manager.prepare_store(prompt[-1:])
        move = Transfer(0, Kind.PROMOTE, slots, keys=prompt[-1:])
        told.promoted(request, 0, 4 * len(prompt), [move])
        manager.complete_store(slots)
        return int(slots[0])

    def follow() -> None:
        while told.has_more:
            for news in told.take():
                if isinstance(news, announcer.BlocksStored):
                    assert news.parent is None or news.parent in known
                    known.update(news.hashes)
                else:
                    known.difference_update(news.hashes)

    assert (store(b"parent"), store(b"w")) == (0, 1)
    follow()
    for slot, other in [(1, b"x"), (0, b"y")]:
        manager.forget(np.array([slot], np.int32))
        assert store(other) == slot
    for slot in (0, 1):
        manager.forget(np.array([slot], np.int32))
    assert (store(b"parent"), store(b"parent", b"child")) == (1, 0)
    follow()
    assert known == {b"parent", b"child"}
