"""A pool keeps a block once, and what any of its engines uses stays in it.

Managers and directories are real, in one process. A lookup finds what is in the engine's own slots
and what peers have, and computes the rest, as the scheduler does.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache import lasting
from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.cache.seats import READER, lock_file
from kv_offload.cache.slots import MissingKeyError, Run, Slots

NUM_SLOTS = 120


class Member:
    """An engine of a pool; what it does takes no time."""

    def __init__(self, pool: Path, number: int, policy: str = "lru", *, once: bool = True) -> None:
        seat = pool / f"seat-{number}"
        seat.mkdir()
        arenas = {0: seat / f"rank-0.kind.{number}"}
        arenas[0].touch()
        self.manager = LastingManager(make_policy(policy, NUM_SLOTS))
        self.manager.limit_slots(0)
        self.manager.open(arenas)
        self.manager.limit_slots(NUM_SLOTS)
        self.manager.share()
        assert self.manager.peers is not None
        self.peers = self.manager.peers
        self.once = once
        self.hits = self.loaded = 0

    def meet(self) -> None:
        """Map the arenas of all others."""
        self.peers.directories.refresh()
        for peer in self.peers.directories.all:
            self.peers.open(peer, NUM_SLOTS)

    def begin(self, keys: list[bytes]) -> Slots:
        """Begin to load what a prompt hits."""
        host = self.manager
        readable = host.readable(keys)
        hits = len(keys) if readable.all() else int(readable.argmin())
        assert host.reserve(keys[:hits])
        slots = host.prepare_load(keys[:hits])
        host.end_step()
        return slots

    def serve(self, keys: list[bytes]) -> int:
        """Serve a prompt; return how many of its blocks were hits."""
        host = self.manager
        slots = self.begin(keys)
        hits = len(slots)
        self.loaded += hits - len(host.owned(slots))
        host.complete_load(slots)
        new = [key for key in keys if key not in host]
        along = host.find([key for key in keys if key in host])
        slots, _ = host.offer(new, [Run(len(new), len(keys), must=not self.once)], along)
        host.complete_store(slots)
        host.check_integrity()
        assert not self.peers.num_leases
        self.hits += hits
        return hits

    def kept(self) -> set[bytes]:
        return {*self.manager.readable_slots()}


def make_pool(folder: Path, count: int, *arguments: str, once: bool = True) -> list[Member]:
    folder.mkdir(exist_ok=True)
    members = [Member(folder, number, *arguments, once=once) for number in range(count)]
    for member in members:
        member.meet()
    return members


def conversations(members: list[Member], seed: int, turns: int = 1500) -> int:
    """Have conversations change the engine at random; return the hits of all."""
    chance = random.Random(seed)
    lengths = dict.fromkeys(range(40), 4)
    for _ in range(turns):
        number = min(int(chance.expovariate(1 / 12)), 39)
        keys = [b"%036d" % (1000 * number + block) for block in range(lengths[number])]
        if lengths[number] == 16:
            lengths[number] = 0
        lengths[number] += 2
        chance.choice(members).serve(keys)
    return sum(member.hits for member in members)


def blocks(first: int, count: int) -> list[bytes]:
    return [b"%036d" % number for number in range(first, first + count)]


@pytest.mark.parametrize(("count", "more"), [(2, 1.08), (4, 1.12)])
def test_a_pool_that_keeps_blocks_once_has_more_of_them_and_more_hits(
    tmp_path: Path, count: int, more: float
) -> None:
    once = make_pool(tmp_path / "once", count)
    twice = make_pool(tmp_path / "twice", count, once=False)
    hits = [conversations(members, seed=1, turns=500) for members in (once, twice)]
    assert hits[0] > more * hits[1]
    kept = [len(set().union(*[one.kept() for one in members])) for members in (once, twice)]
    assert kept[0] > 0.85 * count * NUM_SLOTS
    assert kept[0] > 1.2 * kept[1]


def test_what_a_peer_used_counts_as_used_here(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    for first in range(0, NUM_SLOTS, 10):
        owner.serve(blocks(first, 10))
    assert reader.serve(blocks(0, 10)) == 10
    owner.serve(blocks(1000, NUM_SLOTS - 10))
    assert owner.kept() == {*blocks(0, 10), *blocks(1000, NUM_SLOTS - 10)}


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_any_bytes_in_the_marks_change_only_the_order(tmp_path: Path, policy: str) -> None:
    """Any process of the same user may write them, also of slots that have nothing."""
    members = make_pool(tmp_path, 2, policy)
    chance = np.random.default_rng(5)
    for turn in range(60):
        for member in members:
            (peer,) = member.peers.directories.all
            peer.contents.marks[:] = chance.integers(0, 256, NUM_SLOTS + 1)
            member.serve(blocks(int(chance.integers(0, 30)) * 10, 20))
        if turn == 30:
            members[0].manager.reset()
    assert sum(member.hits for member in members) > 200


def test_what_a_peer_has_is_stored_only_if_it_must_be(tmp_path: Path) -> None:
    """Of one prompt some blocks are here, some there, and the rest is stored."""
    peer, own = make_pool(tmp_path, 2)
    peer.serve(blocks(0, 4))
    keys = blocks(0, 3) + blocks(100, 2) + blocks(3, 1)
    slots, worth = own.manager.offer(keys, [Run(6, 6)])
    own.manager.complete_store(slots)
    assert worth.tolist() == [False, False, False, True, True, False]
    assert own.kept() == {*blocks(100, 2)}
    assert own.manager.left_to_peers == 4
    slots, worth = own.manager.offer(blocks(0, 4), [Run(2, 4, must=True), Run(2, 4)])
    assert worth.tolist() == [True, True, False, False]
    peer.manager.reset()
    slots, worth = own.manager.offer(blocks(2, 2), [Run(2, 4)])
    assert worth.all()
    assert len(slots) == 2


def test_parts_of_a_run_know_what_is_before_them(tmp_path: Path) -> None:
    wanted = np.array([True, True, False, True, False, False, True])
    runs = [Run(3, 30, False, b"a"), Run(2, 20, False, b"b"), Run(2, 10, True)]
    parts = lasting._runs_of(runs, wanted)
    assert parts == [Run(2, 30, False, b"a"), Run(1, 20, False, b"b"), Run(1, 10, True)]


def test_a_slot_that_a_peer_reads_is_not_written_before_it_has_read_it(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 8)
    owner.serve(keys)
    slots = reader.begin(keys)
    assert len(slots) == 8
    assert len(reader.manager.owned(slots)) == 0
    read = set(owner.manager.find(keys).tolist())
    for first in range(1000, 1000 + 4 * NUM_SLOTS, 30):
        given = owner.manager.prepare_store(blocks(first, 30))
        assert read.isdisjoint(given.tolist())
        owner.manager.complete_store(given)
        owner.manager.check_integrity()
    assert not owner.manager.readable(keys).any()
    assert owner.manager.slots_in_use == NUM_SLOTS
    reader.manager.complete_load(slots)
    for first in range(9000, 9000 + 2 * NUM_SLOTS, 30):
        owner.serve(blocks(first, 30))
    assert len(owner.kept()) == NUM_SLOTS


def test_keys_whose_slots_are_leased_are_stored_once_they_have_others(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    owner.serve(blocks(0, NUM_SLOTS))
    slots = reader.begin(blocks(0, NUM_SLOTS))
    new = blocks(1000, 10)
    assert len(owner.manager.prepare_store(new)) == 0
    assert not [key for key in new if key in owner.manager]
    reader.manager.complete_load(slots)
    owner.manager.complete_store(owner.manager.prepare_store(new))
    assert owner.manager.readable(new).all()
    owner.manager.check_integrity()


def test_of_two_loads_of_a_slot_the_last_one_ends_the_lease(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    own = owner.manager.find(keys)
    loads = [reader.begin(keys), reader.begin(keys)]
    for load in loads:
        assert owner.manager.directory.are_leased(own).all()
        reader.manager.complete_load(load)
    assert not owner.manager.directory.are_leased(own).any()


def test_hits_of_one_step_that_share_a_prefix_have_leases_each(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    owner.serve(blocks(0, 8))
    host, prompts = reader.manager, [blocks(0, count) for count in (4, 6, 8)]
    for keys in prompts:
        assert host.readable(keys).all()
        assert host.reserve(keys)
    assert host.readable(blocks(0, 8)).all()  # for a request that waits
    loads = [host.prepare_load(keys) for keys in reversed(prompts)]
    host.end_step()
    own = owner.manager.find(blocks(0, 8))
    for slots, keys in zip(loads, reversed(prompts), strict=True):
        assert (slots & 0xFFFFFF).tolist() == owner.manager.find(keys).tolist()
    for slots, left in zip(loads, (6, 4, 0), strict=True):
        host.complete_load(slots)
        assert owner.manager.directory.are_leased(own).tolist() == [
            block < left for block in range(8)
        ]
    assert not reader.peers.num_leases


@pytest.mark.parametrize(("first", "count"), [(0, 3), (3, 5), (2, 4)])
def test_of_a_prompt_only_what_is_not_here_is_loaded_from_a_peer(
    tmp_path: Path, first: int, count: int
) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys, here = blocks(0, 8), blocks(first, count)
    owner.serve(keys)
    slots, _ = reader.manager.offer(here, [Run(count, count, must=True)])
    reader.manager.complete_store(slots)
    load = reader.begin(keys)
    assert len(load) == 8
    assert reader.manager.owned(load).tolist() == slots.tolist()
    assert reader.peers.num_leases == 8 - count
    leased = owner.manager.directory.are_leased(owner.manager.find(keys))
    assert leased.tolist() == [key not in here for key in keys]
    reader.manager.complete_load(load)
    assert not reader.peers.num_leases


def test_a_window_that_only_a_peer_has_is_loaded_though_its_search_went_back(
    tmp_path: Path,
) -> None:
    """The search finds some of the blocks twice, and the load needs what is here, too."""
    own, peer = make_pool(tmp_path, 2)
    window = CacheGroup(1, 16, window_tokens=8 * 16 + 1)
    prefixes = PrefixMap(
        (CacheGroup(0, 16), window), 16, lambda block_hash, group: block_hash + bytes(4 * group)
    )
    hashes = [b"%032d" % number for number in range(40)]
    for member, group, count in ((own, prefixes.groups[0], 40), (peer, window, 34)):
        member.serve(prefixes.slot_keys(hashes, group, 0, count))
    own.meet()
    end, _ = prefixes.longest_hits(hashes, own.manager.readable, 0, 40 * 16)
    assert end == 34 * 16
    keys = prefixes.needed_keys(hashes, 0, end)
    assert own.manager.reserve(keys)
    slots = own.manager.prepare_load(keys)
    assert len(own.manager.owned(slots)) == 34
    own.manager.end_step()
    own.manager.complete_load(slots)
    assert not own.peers.num_leases


@pytest.mark.parametrize("seed", range(20))
def test_what_lookups_found_in_any_order_is_reserved_and_held(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    own, peer = make_pool(tmp_path, 2)
    keys = blocks(0, 60)
    peer.serve(keys)
    for _ in range(100):
        found: set[bytes] = set()
        for _ in range(chance.randint(1, 4)):
            asked = keys[(first := chance.randrange(40)) : first + chance.randint(1, 20)]
            assert own.peers.look_up(asked).all()
            found |= {*asked}
        wanted = [key for key in keys[chance.randrange(40) :] if chance.random() < 0.9]
        assert own.peers.reserve([*blocks(1000, chance.randrange(3)), *wanted])
        if held := [key for key in wanted if key in found]:
            slots = own.peers.hold(held)
            assert own.peers.drop()
            assert own.peers.num_leases == len(held)
            own.peers.release(slots)
        own.peers.drop()
        assert not own.peers.num_leases


def test_a_key_that_was_lost_and_is_found_again_in_the_same_step_is_reserved(
    tmp_path: Path,
) -> None:
    own, peer = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    peer.serve(keys)
    assert own.peers.look_up(keys).all()
    slots = peer.manager.find(keys[2:3])
    peer.manager.forget(slots)
    assert not own.peers.reserve(keys)
    own.peers._lost.clear()  # as when its time is over
    peer.serve(keys)
    assert own.peers.look_up(keys).all()
    assert own.peers.reserve(keys)
    own.peers.release(own.peers.hold(keys))
    assert own.peers.drop()
    assert not own.peers.num_leases


def test_what_is_reserved_and_not_loaded_is_given_back(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    host, own = reader.manager, owner.manager.find(keys)
    assert host.readable(keys).all()
    assert not owner.manager.directory.are_leased(own).any()
    assert host.reserve(keys)
    assert owner.manager.directory.are_leased(own).all()
    seen = host.forgotten
    host.end_step()
    assert not owner.manager.directory.are_leased(own).any()
    assert host.forgotten > seen
    with pytest.raises(MissingKeyError):
        host.prepare_load(keys)
    host.check_integrity()


def test_a_key_that_leaves_before_it_is_leased_is_not_found_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    host = reader.manager
    assert host.readable(keys).all()
    owner.manager.forget(owner.manager.find(keys[2:]))
    assert not host.reserve(keys)
    assert host.readable(keys).tolist() == [True, True, False, False]
    assert host.reserve(keys[:2])
    host.end_step()
    owner.serve(keys)
    assert host.readable(keys).tolist() == [True, True, False, False]
    monkeypatch.setattr("kv_offload.cache.peer_slots.time.monotonic", lambda: 1e9)
    assert host.readable(keys).all()


@pytest.mark.parametrize("lives", [False, True])
def test_only_a_reader_that_has_ended_loses_its_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    reader.begin(keys)
    if not lives:
        reader.peers.directories._reader()  # the kernel ends its lock
    now = [0.0]
    monkeypatch.setattr("kv_offload.cache.lasting.time.monotonic", lambda: now[0])
    for first in range(1000, 1000 + 4 * NUM_SLOTS, 30):
        now[0] += 10
        owner.serve(blocks(first, 30))
    assert len(owner.kept()) == NUM_SLOTS - 4 * lives
    assert (lock_file(tmp_path / "seat-1" / READER) is None) is lives


def test_the_next_reader_of_a_seat_has_no_leases(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    reader.begin(keys)
    own = owner.manager.find(keys)
    following = LastingManager(make_policy("lru", NUM_SLOTS))
    following.limit_slots(0)
    following.open({0: tmp_path / "seat-1" / "rank-0.kind.1"})
    following.share()
    assert following.peers is not None
    assert following.peers.directories.all == ()  # the one before still has the leases
    assert owner.manager.directory.are_leased(own).all()
    reader.peers.directories._reader()
    following.peers.directories.refresh()
    assert len(following.peers.directories.all) == 1
    assert not owner.manager.directory.are_leased(own).any()
    following.close()


def test_the_next_owner_keeps_to_the_leases_that_it_finds(tmp_path: Path) -> None:
    """With the directory, and with a new one while the process of the old one lives."""
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    read = owner.manager.find(keys)
    slots = reader.begin(keys)
    arenas = {0: tmp_path / "seat-0" / "rank-0.kind.0"}
    for closes in (False, True, True):
        following = LastingManager(make_policy("lru", NUM_SLOTS))
        following.limit_slots(0)
        following.open(arenas)
        following.limit_slots(NUM_SLOTS)
        assert following.directory.is_continued is (closes and owner.manager is not following)
        for first in range(1000, 1000 + 4 * NUM_SLOTS, 30):
            given = following.prepare_store(blocks(first, 30))
            assert not set(given.tolist()) & set(read.tolist())
            following.complete_store(given)
        following.close()
    reader.manager.complete_load(slots)
    following = LastingManager(make_policy("lru", NUM_SLOTS))
    following.limit_slots(0)
    following.open(arenas)
    following.limit_slots(NUM_SLOTS)
    given = following.prepare_store(blocks(0, NUM_SLOTS))
    assert len(given) == NUM_SLOTS
    assert len(os.listdir(tmp_path / "seat-0")) == 3  # arena, directory, reader


def test_after_a_reset_nothing_is_read_from_peers_but_loads_end(tmp_path: Path) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    slots = reader.begin(keys)
    reader.manager.reset()
    assert not reader.manager.readable(keys).any()
    assert owner.manager.directory.are_leased(owner.manager.find(keys)).all()
    reader.manager.complete_load(slots)
    assert not owner.manager.directory.are_leased(owner.manager.find(keys)).any()
    assert reader.begin(keys).tolist() == []


def test_after_a_reset_of_its_owner_nothing_is_leased_and_what_is_read_stays(
    tmp_path: Path,
) -> None:
    owner, reader = make_pool(tmp_path, 2)
    keys = blocks(0, 4)
    owner.serve(keys)
    read = owner.manager.find(keys)
    slots = reader.begin(keys[:2])
    assert reader.manager.readable(keys).all()
    owner.manager.reset()
    assert not reader.manager.reserve(keys)
    assert len(owner.manager.prepare_store(blocks(1000, 4))) == 0  # two of the slots are leased
    given = owner.manager.prepare_store(blocks(1000, NUM_SLOTS))
    assert {*given.tolist()} == {*range(NUM_SLOTS)} - {*read[:2].tolist()}
    reader.manager.complete_load(slots)
    reader.manager.end_step()


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_of_a_prompt_that_peers_use_the_beginning_stays(memory_folder: Path, policy: str) -> None:
    owner, reader = make_pool(memory_folder / "pool", 2, policy)
    prompt = blocks(0, 60)
    owner.serve(prompt)
    owner.serve(blocks(5000, 60))
    assert reader.serve(prompt) == 60
    owner.serve(blocks(9000, 90))  # of the prompt, 30 blocks must leave
    kept = [key in owner.kept() for key in prompt]
    assert kept == [True] * 30 + [False] * 30
