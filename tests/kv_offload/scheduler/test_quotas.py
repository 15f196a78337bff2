"""Shares of host memory: a tenant above its own loses its own blocks, and no one else does."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.owners import WINDOWS
from kv_offload.cache.policies import make_policy
from kv_offload.scheduler.quotas import Quotas
from tests.kv_offload.cache.test_shared_pool import blocks, make_pool
from tests.support.played_cases import BLOCK, OTHER, PROMPT, forget
from tests.support.played_engine import PlayedEngine

SLOTS = 64


def slots_of(quotas: Quotas, owner: str) -> int:
    """Return how many slots a tenant has."""
    return quotas.owners.slots_of(owner)


@pytest.mark.parametrize("number", range(20))
def test_counts_hold_whatever_is_stored_used_held_and_evicted(number):
    """Beside the quota, slots change hands as the policy evicts, are held, and are forgotten."""
    rng = random.Random(number)
    manager = CacheManager(make_policy("lru", SLOTS))
    manager.limit_slots(SLOTS)
    counted: Counter[str] = Counter()
    quotas = Quotas(manager, 0.25, lambda name, amount: counted.update({name: int(amount)}))
    held: list[Any] = []
    names = 0
    for _ in range(300):
        owner = rng.choice(["a", "b", "c", ""])
        keys = [f"{owner} {names + index}".encode() for index in range(rng.randint(1, 9))]
        names += len(keys)
        slots = manager.prepare_store(keys)
        quotas.filled(owner, slots)
        manager.complete_store(slots, ok=rng.random() < 0.9)
        known = manager.readable_slots()
        own = [slot for key, slot in known.items() if key.startswith(f"{owner} ".encode())]
        used = np.array(own[: rng.randint(0, 5)], np.int32)
        quotas.owners.use(used)
        if len(used) and rng.random() < 0.2:
            manager.prepare_copy(used)
            held.append(used)
        if held and rng.random() < 0.3:
            manager.complete_load(held.pop(0))
        if rng.random() < 0.01:
            manager.reset()
            quotas.owners.clear()
            held_after = [part for part in held if len(part)]
            for part in held_after:
                manager.complete_load(part)
            held.clear()
        quotas.owners.check_integrity()
        manager.check_integrity()
        most = SLOTS // 4 + len(keys) + sum(map(len, held))
        assert slots_of(quotas, owner) <= most
    assert counted["quota_evictions"] > 100


def test_what_peers_use_of_a_tenant_stays_while_its_other_blocks_go(tmp_path: Path) -> None:
    """Memory has room, so that the policy evicts nothing."""
    owner, reader = make_pool(tmp_path, 2)
    manager = owner.manager
    quotas = Quotas(manager, 0.5, lambda name, amount: None)

    def store(tenant: str, keys: list[bytes]) -> None:
        slots = manager.prepare_store(keys)
        quotas.filled(tenant, slots)
        manager.complete_store(slots)

    store("b", blocks(900, 10))
    for first in range(0, 60, 10):
        store("a", blocks(first, 10))
    assert reader.serve(blocks(0, 10)) == 10
    assert reader.serve(blocks(900, 10)) == 10
    store("a", blocks(500, 30))
    left = [*range(10), *range(40, 60), *range(500, 530), *range(900, 910)]
    assert owner.kept() == {b"%036d" % number for number in left}
    quotas.owners.check_integrity()


FILLERS = [[(number >> bit) & 1 for bit in range(8)] * 3 for number in range(16)]
PROMPT_BLOCKS = len(PROMPT) // BLOCK


def test_what_is_held_or_being_written_is_kept_and_counts():
    manager = CacheManager(make_policy("lru", SLOTS))
    manager.limit_slots(SLOTS)
    quotas = Quotas(manager, 0.25, lambda name, amount: None)
    kept = [f"kept {number}".encode() for number in range(16)]
    slots = manager.prepare_store(kept)
    quotas.filled("a", slots)
    manager.complete_store(slots)
    manager.prepare_copy(slots)
    quotas.filled("a", manager.prepare_store([b"being written"]))
    quotas.filled("a", manager.prepare_store([b"next"]))
    assert manager.readable(kept).all()
    assert b"being written" in manager
    assert slots_of(quotas, "a") == 18
    manager.complete_load(slots)
    quotas.filled("a", manager.prepare_store([b"last"]))
    assert slots_of(quotas, "a") == 16
    quotas.owners.check_integrity()


def test_a_step_looks_at_few_slots_of_a_tenant_that_holds_all(monkeypatch):
    """They are evicted nevertheless, by the next calls, once they are held no longer."""
    manager = CacheManager(make_policy("lru", 16_384))
    manager.limit_slots(16_384)
    quotas = Quotas(manager, 0.5, lambda name, amount: None)
    stored = []

    def store(number):
        keys = [f"{len(stored)} {index}".encode() for index in range(number)]
        stored.append(manager.prepare_store(keys))
        quotas.filled("a", stored[-1])
        manager.complete_store(stored[-1])
        return stored[-1]

    held = [store(64) for _ in range(128)]
    for slots in held:
        manager.prepare_copy(slots)
    looked = []
    idle = manager.idle
    monkeypatch.setattr(manager, "idle", lambda slots: looked.append(len(slots)) or idle(slots))
    store(1)
    assert 0 < sum(looked) <= sum(WINDOWS)
    assert slots_of(quotas, "a") == 8192 + 1
    manager.complete_load(held[-1])
    for _ in range(8192 // sum(WINDOWS) + 1):
        store(1)
    assert slots_of(quotas, "a") <= 8192 + 1
    for slots in held[:-1]:
        manager.complete_load(slots)
    store(1)
    assert slots_of(quotas, "a") == 8192
    quotas.owners.check_integrity()


def hits(engine: PlayedEngine, prompt: list[int], salt: str | None) -> float:
    forget(engine)
    before = engine.totals["hit_tokens"]
    engine.serve("asks", prompt, 1, cache_salt=salt)
    return engine.totals["hit_tokens"] - before


def serve_many(engine: PlayedEngine, salt: str | None) -> None:
    for number, prompt in enumerate(FILLERS):
        engine.serve(f"filler {number}", prompt, 1, cache_salt=salt)
    forget(engine)


@pytest.mark.parametrize("share", [0.25, 1])
def test_a_tenant_that_stores_much_displaces_its_own_blocks(share):
    engine = PlayedEngine(plugin={"max_share_per_salt": share}, slots=32)
    engine.serve("quiet", PROMPT, 1, cache_salt="quiet")
    serve_many(engine, "busy")
    bounded = share < 1
    assert hits(engine, PROMPT, "quiet") == PROMPT_BLOCKS * BLOCK * bounded
    assert hits(engine, FILLERS[-1], "busy") > 0, "its latest prompt"
    assert hits(engine, FILLERS[0], "busy") == 0
    assert (engine.totals["quota_evictions"] > 0) == bounded


@pytest.mark.parametrize("store_blocks", ["all", "prompt"])
def test_of_a_prompt_that_is_longer_than_the_share_the_beginning_is_stored(store_blocks):
    """It is computed in four steps. No other prompt of its tenant need go for what is not kept."""
    plugin = {"max_share_per_salt": 0.25, "store_blocks": store_blocks}
    engine = PlayedEngine(plugin=plugin, slots=32, blocks=40)
    long = [(number * number // 3) % 2 for number in range(13 * BLOCK)]
    engine.serve("long", long, 3)
    assert hits(engine, long, None) == 8 * BLOCK
    assert engine.totals["quota_evictions"] == 0
    engine.serve("others", PROMPT, 1)
    assert hits(engine, PROMPT, None) == PROMPT_BLOCKS * BLOCK
    engine.rest()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return {"disk": {"path": str(tmp_path), "bytes": "1MiB"}}


@pytest.mark.parametrize("share", [0.1, 1])
def test_a_tenant_has_a_share_of_the_disk(share, disk):
    engine = PlayedEngine(plugin={"max_share_per_salt": share, **disk})
    engine.serve("quiet", PROMPT, 1, cache_salt="quiet")
    serve_many(engine, "busy")
    tier = engine.offload.tiers.tiers["disk"]
    assert tier.manager is not None
    most = int(share * tier.manager.usable_slots)
    of_busy = len(engine.blocks_on_disk()) - PROMPT_BLOCKS
    assert of_busy == most if share < 1 else of_busy > 0.1 * tier.manager.usable_slots
    engine.offload.manager.reset()
    assert hits(engine, PROMPT, "quiet") == PROMPT_BLOCKS * BLOCK, "from the disk"
    assert hits(engine, FILLERS[-1], "busy") > 0
    engine.offload.check_integrity()
    left = engine.blocks_on_disk()
    records = engine.ranks[0].tier.records
    engine.connector.shutdown()
    engine = PlayedEngine(plugin={"max_share_per_salt": share, **disk})
    engine.ranks[0].tier.records = records
    assert engine.blocks_on_disk() == left, "a restart finds no more, and no less"
    quotas = engine.offload.tiers._quotas.get("disk")
    assert hits(engine, PROMPT, "quiet") == PROMPT_BLOCKS * BLOCK
    assert quotas is None or slots_of(quotas, "quiet") == PROMPT_BLOCKS, "it counts once it is read"
    engine.offload.resets.reset_cache()
    assert quotas is None or slots_of(quotas, "quiet") == 0
    engine.connector.shutdown()


def test_what_a_tenant_uses_stays_while_its_other_blocks_go():
    engine = PlayedEngine(plugin={"max_share_per_salt": 0.5}, slots=32)
    for number, prompt in enumerate(FILLERS):
        engine.serve(f"filler {number}", prompt, 1)
        assert number == 0 or hits(engine, PROMPT, None) == PROMPT_BLOCKS * BLOCK
        if number == 0:
            engine.serve("used", PROMPT, 1)
    assert hits(engine, FILLERS[1], None) == 0


def test_a_prefix_that_requests_of_a_step_share_counts_once():
    engine = PlayedEngine(plugin={"max_share_per_salt": 0.5}, slots=32)
    for name in ("first", "same"):
        engine.add(name, PROMPT, 1, cache_salt="a")
    engine.add("other", OTHER, 1, cache_salt="b")
    engine.run()
    quotas = engine.offload._quotas
    assert slots_of(quotas, "a") == PROMPT_BLOCKS
    quotas.owners.check_integrity()
