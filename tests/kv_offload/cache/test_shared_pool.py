"""A pool keeps a block once, and what any of its engines uses stays in it.

Managers and directories are real, in one process. A look-up takes what is in the engine's own
slots, then what peers have, and computes the rest, as the scheduler does.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache import lasting
from kv_offload.cache.key_index import Names
from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.peers import PeerDirectories
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slots import Run

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
        self.peers = PeerDirectories(arenas)
        self.once = once
        if once:
            self.manager.share(lambda keys: self.peers.have(keys, uses=True))
        self.hits = self.copied = 0

    def serve(self, keys: list[bytes]) -> int:
        """Serve a prompt; return how many of its blocks were hits."""
        host = self.manager
        local = host.readable(keys)
        either = local | self.peers.have(keys)
        hits = len(keys) if either.all() else int(either.argmin())
        missing = [key for key, has in zip(keys[:hits], local.tolist(), strict=False) if not has]
        if missing:
            slots = host.prepare_store(missing, host.find(keys[:hits])[local[:hits]])
            host.complete_store(slots)
            self.peers.have(missing[: len(slots)], uses=True)  # as ranks do
            if self.once:
                host.are_copies(slots)
            hits = len(keys[:hits]) if len(slots) == len(missing) else 0
        if hits:
            host.complete_load(host.prepare_load(keys[:hits]))
        self.copied += len(missing)
        new = [key for key in keys if key not in host]
        along = host.find([key for key in keys if key in host])
        slots, _ = host.offer(new, [Run(len(new), len(keys))], along)
        host.complete_store(slots)
        host.check_integrity()
        self.hits += hits
        return hits

    def kept(self) -> set[bytes]:
        return {*self.manager.readable_slots()}


def make_pool(folder: Path, count: int, *arguments: str, once: bool = True) -> list[Member]:
    folder.mkdir(exist_ok=True)
    members = [Member(folder, number, *arguments, once=once) for number in range(count)]
    for member in members:
        member.peers.refresh()
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
            (peer,) = member.peers.all
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


def fill(own: Member, copied: list[bytes], count: int = NUM_SLOTS) -> None:
    """Have all slots used, the latest by what was copied from a peer."""
    own.serve(blocks(5000, count - len(copied)))
    assert own.serve(copied) == len(copied)
    assert len(own.kept()) == count


def test_a_copy_leaves_first_but_not_the_last_one(tmp_path: Path) -> None:
    peer, own = make_pool(tmp_path, 2)
    copied = blocks(0, 8)
    peer.serve(copied)
    fill(own, copied)
    own.serve(blocks(6000, 4))
    assert own.kept() == {*blocks(5000, NUM_SLOTS - 8), *copied[:4], *blocks(6000, 4)}
    peer.manager.reset()
    own.serve(blocks(7000, 2))
    assert {*copied[:4]} <= own.kept()
    evicted = {*blocks(5000, NUM_SLOTS - 8)} - own.kept()
    assert len(evicted) == 2
    (seen,) = peer.peers.all
    assert (seen.contents.find(Names.of(copied)) >= 0).tolist() == [True] * 4 + [False] * 4


def test_a_copy_that_leaves_for_its_child_is_not_taken_for_its_parent(tmp_path: Path) -> None:
    """The child gets its slot. As its own parent it could never be evicted."""
    owner, other = make_pool(tmp_path / "pool", 2, "auto")
    prefix = blocks(0, 6)
    owner.serve(prefix)
    other.serve(prefix)
    host = other.manager
    other.serve(blocks(100, NUM_SLOTS - len(prefix)))
    end, before = host.find(prefix)[::-1][:2]
    host.prepare_copy(np.array([end], np.int32))  # that a request retains it, for instance
    child = blocks(6, 1)
    slots, _ = host.offer(child, [Run(1, 7, parent=prefix[4])])
    host.complete_store(slots)
    assert slots.tolist() == [before]
    for first in range(1000, 3000, NUM_SLOTS):
        slots, _ = host.offer(new := blocks(first, NUM_SLOTS), [Run(len(new), len(new))])
        host.complete_store(slots)
    assert child[0] not in host


def test_a_copy_that_is_in_use_does_not_leave(tmp_path: Path) -> None:
    peer, own = make_pool(tmp_path, 2)
    peer.serve(blocks(0, 8))
    fill(own, blocks(0, 8))
    loading = own.manager.prepare_load(blocks(0, 2))
    along = own.manager.find(blocks(2, 2))
    slots = own.manager.prepare_store(blocks(6000, 4), along)
    assert {*blocks(0, 4)} <= own.kept()
    own.manager.complete_store(slots)
    own.manager.complete_load(loading)
    own.manager.check_integrity()


def test_a_copy_that_a_request_waits_for_does_not_leave(tmp_path: Path) -> None:
    """What two requests wait for would displace each other until both are computed."""
    peer, own = make_pool(tmp_path, 2)
    peer.serve(blocks(0, 8))
    own.serve(blocks(5000, NUM_SLOTS))
    for first in (0, 4):
        slots = own.manager.prepare_store(blocks(first, 4))
        own.manager.complete_store(slots)
        own.manager.are_copies(slots)
    assert {*blocks(0, 8)} <= own.kept()
    own.manager.complete_load(own.manager.prepare_load(blocks(0, 8)))
    own.serve(blocks(6000, 2))
    assert len({*blocks(0, 8)} & own.kept()) == 6


def test_two_engines_do_not_both_drop_a_block_because_the_other_has_it(tmp_path: Path) -> None:
    """Each has a copy of it that was made from the other's."""
    first, second = make_pool(tmp_path, 2)
    key = blocks(0, 1)
    first.serve(key)
    fill(second, key)
    first.serve(blocks(3000, NUM_SLOTS - 1))
    first.manager.are_copies(first.manager.find(key))
    first.serve(key)
    others = iter([second])

    def have(keys: list[bytes]) -> np.ndarray:
        for other in others:  # it wants room just before the first one gets an answer
            other.manager.complete_store(other.manager.prepare_store(blocks(8000, 1)))
        return first.peers.have(keys)

    first.manager.share(have)
    first.manager.complete_store(first.manager.prepare_store(blocks(9000, 1)))
    assert (key[0] in first.kept(), key[0] in second.kept()) == (False, True)
    (seen,) = first.peers.all
    assert seen.claim(key).rows.tolist() == [0]


@pytest.mark.parametrize(("order", "lost"), [("withdraw, ask", False), ("ask, withdraw", True)])
def test_all_orders_of_two_engines_that_drop_a_copy(order: str, lost: bool) -> None:
    """Each has one. The control is the order in which both find the other's."""
    finals = set()
    for turns in itertools.permutations([0, 0, 0, 1, 1, 1]):
        kept, listed, found = [True, True], [True, True], [False, False]
        steps = [iter([*order.split(", "), "end"]) for _ in range(2)]
        for own in turns:
            match next(steps[own]):
                case "withdraw":
                    listed[own] = False
                case "ask":
                    found[own] = listed[1 - own]
                case "end":
                    kept[own] = listed[own] = not found[own]
        finals.add(any(kept))
    assert (False in finals) is lost
    assert True in finals


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
