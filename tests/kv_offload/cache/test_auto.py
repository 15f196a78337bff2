"""The policy that learns: what it learns, what it declines, and what it remembers."""

from __future__ import annotations

import random
import resource

import numpy as np
import pytest

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.policies.auto import MIN_EPOCH, NOTED_ACCESSES, QUIET_SHARE, AutoPolicy
from kv_offload.cache.policies.density import AGES, CLASSES, LENGTHS, HitDensity
from kv_offload.cache.policies.history import History, hash_keys
from kv_offload.cache.policies.prefixes import FIRST, PrefixOrder
from kv_offload.cache.policies.rivals import MIN_CHANGE, MIN_NEW
from kv_offload.cache.slots import NO_SLOTS, Run, Slots
from kv_offload.simulation.replay import replay
from kv_offload.simulation.trace import TraceRequest
from tests.support.slow import rest_is_slow


def buckets(epoch: int, *classes: int) -> np.ndarray:
    return np.array([epoch * CLASSES + one for one in classes], np.int64)


def live_through(density: HitDensity, epochs: int) -> None:
    """Blocks of class 0 are used again after two epochs, of class 1 after 20, of 2 never."""
    none = buckets(0)
    waits = {0: 2, 1: 20}
    for _ in range(epochs):
        now = density.epoch
        begun = buckets(now, *[0] * 30, *[1] * 30, *[2] * 30)
        ended = [
            buckets(now - wait, *[one] * 30) for one, wait in waits.items() if wait < now - 257
        ]
        density.count(begun, np.concatenate([none, *ended]), none)
        density.next_epoch()
    density.compute()


def test_density_is_highest_shortly_before_blocks_like_it_are_used():
    density = HitDensity(1000)
    live_through(density, 200)
    at_access = density.new[:3].tolist()
    assert at_access == sorted(at_access, reverse=True), "soon, late, never"
    assert at_access[0] > 2 * at_access[1]
    assert at_access[1] > 1.5 * at_access[2]
    young, due, late = (density.of(buckets(density.epoch - age, 1))[0] for age in (1, 18, 60))
    assert due > young > late
    assert density.likely(buckets(density.epoch, 0, 1, 2)).tolist() == [True, True, False]


def test_without_evidence_the_older_block_is_worth_less_and_all_classes_are_alike():
    density = HitDensity(1000)
    by_age = [density.of(buckets(density.epoch - age, 3))[0] for age in (0, 1, 5, 50, AGES)]
    assert by_age == sorted(by_age, reverse=True)
    assert len({*density.new.tolist()}) == 1
    assert density.likely(buckets(density.epoch, *range(CLASSES))).all()


def test_evidence_fades_when_traffic_changes():
    density = HitDensity(10)
    live_through(density, 100)
    before = density.new[0]
    none = buckets(0)
    for _ in range(100):
        density.count(buckets(density.epoch, *[0] * 30), none, none)
        density.next_epoch()
    density.compute()
    assert density.new[0] < before / 10


def test_history_gives_back_what_it_was_told_once():
    history = History(1 << 12, 1)
    hashes = hash_keys([b"a", b"b", b"c"])
    assert history.put(hashes, buckets(9, 1, 2, 3)).tolist() == []
    assert len(history) == 3
    assert history.take(hash_keys([b"b", b"x", b"a"])).tolist() == [
        *buckets(9, 2),
        0,
        *buckets(9, 1),
    ]
    assert history.take(hashes).tolist() == [0, 0, *buckets(9, 3)]


def test_history_tells_whom_it_forgot_so_that_nobody_waits_for_them():
    rng = np.random.default_rng(0)
    history = History(64, 1)
    put, forgotten, found = 0, 0, 0
    for round_ in range(20):
        hashes = rng.integers(0, 1 << 64, 50, np.uint64)
        forgotten += len(history.put(hashes, buckets(round_ + 1, *[0] * 50)))
        put += 50
        found += int((history.take(hashes[:10]) > 0).sum())
    assert put == len(history) + forgotten + found
    assert found > 0


def test_evictions_from_a_full_memory_take_no_new_pages():
    """A page that the system gives takes longer than all else that is done for a key."""
    taken = []
    for fills in (True, False):
        policy = AutoPolicy(1 << 16)
        if fills:
            policy.add(np.arange(1 << 16, dtype=np.int32), [b"%d" % at for at in range(1 << 16)])
        hashes = np.random.default_rng(0).integers(0, 1 << 64, 2000, np.uint64)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        policy._history.put(hashes, np.full(2000, 9))
        taken.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert taken[0] < 100
    assert taken[1] > 1000, "the control"


def test_what_waits_is_taken_in_by_a_step_without_an_access():
    policy = AutoPolicy(8192)
    manager = CacheManager(policy)
    manager.complete_store(manager.prepare_store([b"%d" % at for at in range(8192)]))
    enough = NOTED_ACCESSES // QUIET_SHARE
    for new in (["first"], range(enough)):  # the first eviction takes in what is stored
        keys = [b"new %a" % key for key in new]
        manager.complete_store(manager.offer(keys, [Run(len(keys), 100)])[0])
    manager.policy.catch_up()
    assert len(policy._history) == 0, "its step has work enough"
    manager.policy.catch_up()
    assert len(policy._history) > enough * 0.9
    manager.check_integrity()


def serve(
    manager: CacheManager, *prompts: list[bytes], tokens: int = 100, must: bool = False
) -> list[bool]:
    """Store the prompts in one call; return which of the new keys were worth a slot."""
    keys = [key for keys in prompts for key in keys]
    known = manager.find(keys)
    missing = [key for key, slot in zip(keys, known.tolist(), strict=True) if slot < 0]
    runs = [Run(sum(key in missing for key in keys), tokens, must) for keys in prompts]
    slots, worth = manager.offer(missing, [run for run in runs if run.keys], known[known >= 0])
    manager.complete_store(slots)
    manager.check_integrity()
    return worth.tolist()


HOT = [b"hot %d %d" % (prompt, block) for prompt in range(16) for block in range(2)]


def warmed(policy: str = "auto") -> CacheManager:
    """Return a full cache of 64 that has seen 16 prompts again and again, and others once."""
    manager = CacheManager(make_policy(policy, 64))
    fresh = iter(range(10**9))
    for turn in range(300):
        serve(manager, HOT[turn % 16 * 2 :][:2])
        serve(manager, [b"%d" % next(fresh) for _ in range(8)])
    return manager


def test_what_never_comes_again_does_not_displace_what_does():
    assert warmed().readable(HOT).mean() > 0.9
    assert warmed("lru").readable(HOT).mean() < 0.5, "the control"


def let_density_lead(policy: AutoPolicy) -> None:
    """Do as if hit density had been far ahead of recency."""
    policy._rivals._judge(policy._rivals._capacity * 1e6)
    assert policy._rivals.density_leads


def full_cache(once: float, twice: float) -> tuple[AutoPolicy, CacheManager]:
    """Return a full cache, and what a new block is to be worth that was used once or twice."""
    policy = AutoPolicy(4)
    manager = CacheManager(policy)
    manager.complete_store(manager.prepare_store([b"a", b"b", b"c", b"d"]))
    let_density_lead(policy)
    policy._density.new[:LENGTHS] = once
    policy._density.new[LENGTHS:] = twice
    return policy, manager


def test_behind_a_block_that_is_declined_nothing_of_its_request_is_stored():
    policy, manager = full_cache(once=0.0, twice=10.0)
    # Numbers, whose hashes are always the same: the history of so small a cache has few places.
    first, new, second, other = 1, 2, 3, 4
    for key in (first, second, other):
        assert manager.offer([key], [Run(1, 100)])[1].tolist() == [False]
    policy._take_in()
    # All but one come for the second time.
    slots, worth = manager.offer([first, new, second, other], [Run(3, 5000), Run(1, 5000)])
    assert worth.tolist() == [True, False, False, True]
    assert len(slots) == 2
    manager.complete_store(slots)
    manager.check_integrity()


def test_what_must_be_stored_is_stored():
    _, manager = full_cache(once=0.0, twice=10.0)
    keys = [b"x", b"y", b"z"]
    slots, worth = manager.offer(keys, [Run(1, 100), Run(2, 100, must=True)])
    assert worth.tolist() == [False, True, True]
    assert len(slots) == 2
    manager.complete_store(slots)
    manager.check_integrity()


def test_a_key_that_was_worth_a_slot_when_all_were_busy_is_known_to_come_again():
    policy, manager = full_cache(once=10.0, twice=10.0)
    policy._take_in()
    manager.prepare_copy(manager.find([b"a", b"b", b"c", b"d"]))
    slots, worth = manager.offer([b"x"], [Run(1, 100)])
    assert (len(slots), worth.tolist()) == (0, [True])
    manager.check_integrity()


def test_slots_that_were_held_when_victims_were_sought_can_be_evicted_later():
    manager = CacheManager(AutoPolicy(8))
    manager.complete_store(manager.prepare_store([b"%d" % at for at in range(8)]))
    held = manager.prepare_load([b"%d" % at for at in range(6)])
    manager.complete_store(manager.prepare_store([b"a", b"b", b"c"]))
    manager.check_integrity()
    manager.complete_load(held)
    manager.check_integrity()
    assert len(manager.prepare_store([b"new %d" % at for at in range(8)])) == 8


def test_nothing_is_declined_while_recency_leads():
    policy, manager = full_cache(once=0.0, twice=10.0)
    policy._rivals.clear()
    slots, worth = manager.offer([b"x", b"y"], [Run(2, 100)])
    assert worth.tolist() == [True, True]
    assert len(slots) == 2
    manager.complete_store(slots)
    assert policy.should_demote(slots).all(), "and all is worth a write to a tier below"


def test_while_recency_leads_slots_of_one_epoch_leave_by_their_last_access():
    """What was used most often leaves first if it was used before the others."""
    policy = AutoPolicy(1024)
    manager = CacheManager(policy)
    often, once, *others = (
        [b"%d %d" % (prompt, block) for block in range(16)] for prompt in range(65)
    )
    epoch = policy._density.epoch
    for prompt in (often, often, often, once):
        serve(manager, prompt)
    assert policy._density.epoch == epoch, "they came in one epoch"
    for prompt in others:
        serve(manager, prompt)
    assert not manager.readable(often).any()
    assert manager.readable(once).all()


def test_recency_leads_at_first_and_again_soon_after_hit_density_stops_winning():
    policy = AutoPolicy(64)
    rivals, epoch = policy._rivals, policy._epoch_accesses
    rivals._judge(0)
    assert not rivals.density_leads
    for _ in range(100):
        rivals._judge(epoch / 2)
    assert rivals.density_leads
    for _ in range(40):
        rivals._judge(-epoch / 2)
    assert not rivals.density_leads
    for _ in range(100):
        rivals._judge(epoch / 2)
    for _ in range(400):
        rivals._judge(0)
    assert not rivals.density_leads, "its hits have ended"
    rivals._judge(epoch * 1e3)
    policy.clear()
    assert not rivals.density_leads


def test_many_new_keys_in_a_row_are_stored_until_a_known_one_comes():
    policy = AutoPolicy(4096)
    manager = CacheManager(policy)
    keys = [b"%d" % at for at in range(8192)]
    manager.complete_store(manager.prepare_store(keys[:4096]))
    let_density_lead(policy)
    policy._rivals.see_known()
    policy._density.new[:] = 0.0
    stored = []
    for at in range(4096, 4096 + 4 * MIN_NEW, MIN_NEW // 2):
        slots, _ = manager.offer(keys[at : at + MIN_NEW // 2], [Run(MIN_NEW // 2, 100)])
        manager.complete_store(slots)
        stored.append(len(slots))
    assert stored == [0, 0] + 6 * [MIN_NEW // 2]
    assert manager.readable(keys[4096 + MIN_NEW : 4096 + 4 * MIN_NEW]).all()
    manager.policy.use(
        np.array(manager.slot_numbers(keys[4096 + MIN_NEW : 4097 + MIN_NEW]), np.int32)
    )
    assert policy._rivals.density_leads
    policy._density.new[:] = 0.0
    slots, _ = manager.offer(keys[6000:6010], [Run(10, 100)])
    assert len(slots) == 0
    manager.check_integrity()


def test_after_many_new_keys_in_a_row_recency_leads():
    policy = AutoPolicy(4096)
    let_density_lead(policy)
    known = np.zeros(MIN_NEW, bool)
    for _ in range(2 + MIN_CHANGE // MIN_NEW):
        policy._rivals.see_new(known)
    policy._rivals.see_known()
    assert not policy._rivals.density_leads


def test_the_hits_of_both_rules_are_known_without_their_caches(monkeypatch):
    """Of a loop over twice the capacity recency keeps nothing, and hit density a part."""
    policy = AutoPolicy(512)
    manager = CacheManager(policy)
    leads: list[float] = []
    monkeypatch.setattr(policy._rivals, "_judge", leads.append)
    prompts = [[b"%d %d" % (prompt, block) for block in range(16)] for prompt in range(64)]
    for _ in range(20):
        for prompt in prompts:
            serve(manager, prompt)
    assert 0.3 < np.mean(leads[len(leads) // 2 :]) / policy._epoch_accesses < 0.6


def test_hit_density_is_not_ahead_where_recency_keeps_all(monkeypatch):
    """Prompts that just fit once others have left: the shares of whole epochs miss some hits."""
    policy = AutoPolicy(1024)
    manager = CacheManager(policy)
    leads: list[float] = []
    monkeypatch.setattr(policy._rivals, "_judge", leads.append)
    names = [f"old {index}" for index in range(5)] * 2 + [f"new {index}" for index in range(20)] * 4
    for name in names:
        serve(manager, [f"{name} {block}".encode() for block in range(50)])
    assert len(leads) > 20
    assert max(leads) <= 0


def test_nothing_is_kept_behind_a_gap_whatever_its_class_is_worth():
    """The heads of the prompts are used four times and their tails once, and used ones go first."""
    policy = AutoPolicy(64)
    manager = CacheManager(policy)
    prompts = [[b"%d %d" % (prompt, block) for block in range(4)] for prompt in range(16)]
    for prompt in prompts:
        serve(manager, prompt[:1])
    for _ in range(MIN_EPOCH):
        for prompt in prompts:
            manager.complete_load(manager.prepare_load(prompt[:1]))
    for prompt in prompts:
        slots, _ = manager.offer(prompt[1:], [Run(3, 100, parent=prompt[0])])
        manager.complete_store(slots)
    let_density_lead(policy)
    policy._density.worth[:, -LENGTHS:] = 0.0
    policy._rerank()
    for at in range(20):
        manager.complete_store(manager.prepare_store([b"new %d" % at]))
        for prompt in prompts:
            readable = manager.readable(prompt).tolist()
            assert readable == sorted(readable, reverse=True), "a tail without its head"
        manager.check_integrity()


def test_a_head_whose_tail_is_read_leaves_if_nothing_else_can():
    manager = CacheManager(AutoPolicy(2))
    slots, _ = manager.offer([b"head", b"tail"], [Run(2, 100)])
    manager.complete_store(slots)
    held = manager.prepare_load([b"tail"])
    head = manager.prepare_load([b"head"])
    assert len(manager.prepare_store([b"new"])) == 0
    manager.complete_load(head)
    manager.check_integrity()
    assert manager.prepare_store([b"new"]).tolist() == [0]
    manager.complete_load(held)
    manager.check_integrity()


def test_a_slot_that_lost_its_key_while_it_is_read_is_given_to_no_other_key():
    """It was opened together with the first victim, and its child leaves before it."""
    manager = CacheManager(AutoPolicy(3))
    blocks = [(b"first", 50_000, None), (b"head", 100, None), (b"tail", 2000, b"head")]
    for key, tokens, parent in blocks:
        manager.complete_store(manager.offer([key], [Run(1, tokens, parent=parent)])[0])
    manager.complete_store(manager.prepare_store([b"new"]))
    assert manager.readable([b"first", b"head", b"tail"]).tolist() == [False, True, True]
    read = manager.prepare_load([b"head"])
    manager.forget(read)
    given = manager.prepare_store([b"a", b"b", b"c"])
    assert len(given) == 2
    assert not {*given.tolist()} & {*read.tolist()}
    manager.complete_load(read)
    manager.check_integrity()


def test_as_many_slots_are_given_as_nobody_holds_whatever_stands_behind_what():
    """Prompts of one tree, in a cache for a few blocks; loads and stores end at any time."""
    rng = random.Random(0)
    tree = [b"root"]
    parents: dict[bytes, bytes | None] = {b"root": None}
    manager = CacheManager(AutoPolicy(8))
    loads: list[Slots] = []
    given = 0
    for _ in range(1500):
        if rng.random() < 0.5:
            tree.append(b"%d" % len(parents))
            parents[tree[-1]] = rng.choice(tree[-9:-1])
        key = rng.choice(tree[-8:])
        if manager.readable([key]).all():
            loads.append(manager.prepare_load([key]))
        else:
            free = manager.num_slots - len({*np.concatenate([NO_SLOTS, *loads]).tolist()})
            run = Run(1, 100, must=True, parent=parents[key])
            slots, _ = manager.offer([key], [run])
            assert len(slots) == min(1, free)
            given += len(slots)
            manager.complete_store(slots)
        while len(loads) > rng.randrange(9):
            manager.complete_load(loads.pop(rng.randrange(len(loads))))
        manager.check_integrity()
    assert given > 200


def orders(bucket_of: list[int]) -> PrefixOrder:
    return PrefixOrder(np.array(bucket_of, np.int64))


def split(order: PrefixOrder, *slots: int) -> tuple[list[int], list[int]]:
    free, blocked = order.split(np.array(slots, np.int32))
    return free.tolist(), blocked.tolist()


def link(order: PrefixOrder, slots: list[int], before: list[int]) -> None:
    order.link(np.array(slots, np.int32), np.array(before))


def test_a_list_may_leave_from_its_tails_on():
    order = orders([1] * 6)
    link(order, [0, 1, 2, 3], [FIRST, 0, 1, 2])
    assert split(order, 3, 2, 1, 0) == ([3, 2, 1, 0], [])
    assert split(order, 2, 1, 0) == ([], [2, 1, 0])
    assert split(order, 3, 1, 0) == ([3], [1, 0]), "what is between them stays"
    assert split(order, 3, 4, 2, 1, 5, 0) == ([3, 4, 2, 1, 5, 0], []), "others stand between"
    link(order, [4], [1])
    assert split(order, 3, 2, 1, 0) == ([3, 2], [1, 0]), "another block came behind 1"
    assert split(order, 4, 1, 0) == ([4, 1, 0], [])


def test_a_slot_that_got_another_key_or_lost_it_holds_nobody():
    order = orders([1, 1, 1])
    link(order, [0, 1], [FIRST, 0])
    assert split(order, 0) == ([], [0])
    link(order, [1], [2])
    assert split(order, 0, 2) == ([0], [2])
    link(order, [2], [FIRST])
    assert split(order, 2) == ([2], []), "1 came behind the key that 2 had"
    link(order, [1], [2])
    order._bucket_of[1] = 0
    assert split(order, 2) == ([2], [])
    order = orders([1, 2])
    link(order, [0, 1], [FIRST, 0])
    order.leave(np.array([1], np.int32))
    order._bucket_of[1] = 0
    assert split(order, 0) == ([0], []), "1 was about to leave, and was forgotten"


def leave(order: PrefixOrder, *slots: int) -> list[int]:
    return order.leave(np.array(slots, np.int32)).tolist()


def test_of_what_stays_as_much_leaves_as_follows_each_other_and_was_not_used():
    def listed() -> PrefixOrder:
        """Two prompts, 0 to 4 and 5 to 7; of each the tail is in another bucket."""
        order = orders([1, 1, 1, 1, 2, 1, 1, 2])
        link(order, [0, 1, 2, 3, 4], [FIRST, 0, 1, 2, 3])
        link(order, [5, 6, 7], [FIRST, 5, 6])
        assert split(order, 3, 2, 1, 0, 6, 5) == ([], [3, 2, 1, 0, 6, 5])
        return order

    assert leave(listed(), 4) == [3, 2, 1, 0]
    assert leave(listed(), 4, 7) == [3, 2, 1, 0, 6, 5]
    order = listed()
    order._bucket_of[2] = 3
    assert leave(order, 7, 4) == [6, 5, 3], "2 was used"
    order = listed()
    order.link(np.array([7], np.int32), np.array([1]))
    order._leaves_from[:] = 0
    assert leave(order, 4) == [3, 2], "7 came behind 1"
    assert leave(order, 3, 2) == []
    assert leave(order, 7) == [1, 0]
    order = listed()
    order.begin([])
    assert leave(order, 4) == [], "a new ranking has not looked at them"


def test_what_is_before_a_block_that_is_about_to_leave_does_not_stay():
    order = orders([1, 2])
    link(order, [0, 1], [FIRST, 0])
    assert leave(order, 1) == []
    assert split(order, 0) == ([0], [])
    order.begin([np.array([1], np.int32)])
    assert split(order, 0) == ([], [0]), "it did not leave"
    order.begin([])
    leave(order, 1)
    order.left(np.array([1], np.int32))
    assert split(order, 0) == ([], [0]), "it left, and another key of that bucket has its slot"


def test_a_whole_prompt_leaves_before_a_block_that_is_worth_more():
    """Its tail was used once, its head more often, and the head is worth least of all."""
    policy = AutoPolicy(12)
    manager = CacheManager(policy)
    prompt = [b"prompt %d" % block for block in range(8)]
    manager.complete_store(manager.offer(prompt[:4], [Run(4, 100)])[0])
    for _ in range(4):
        manager.complete_load(manager.prepare_load(prompt[:4]))
    manager.complete_store(manager.offer(prompt[4:], [Run(4, 100, parent=prompt[3])])[0])
    best = [b"best %d" % block for block in range(4)]
    manager.complete_store(manager.offer(best, [Run(4, 100)])[0])
    manager.complete_load(manager.prepare_load(best))
    let_density_lead(policy)
    for uses, density in enumerate((2.0, 3.0, 1.0, 1.0)):
        policy._density.worth[:, uses * LENGTHS :][:, :LENGTHS] = density
    policy._rerank()
    for at in range(8):
        manager.complete_store(manager.prepare_store([b"new %d" % at]))
        manager.check_integrity()
        assert manager.readable(prompt).tolist() == [True] * (7 - at) + [False] * (at + 1)
        assert manager.readable(best).all()


def test_one_victim_does_not_have_a_long_prompt_followed_to_its_beginning(monkeypatch):
    """Its blocks are of two classes by turns, so that each follows another one alone."""
    policy = AutoPolicy(100)
    manager = CacheManager(policy)
    prompt = [b"prompt %d" % block for block in range(100)]
    for at, key in enumerate(prompt):
        tokens = 5000 if at == 99 else 100 if at % 2 else 2000
        parent = prompt[at - 1] if at else None
        manager.complete_store(manager.offer([key], [Run(1, tokens, parent=parent)])[0])
    let_density_lead(policy)
    policy._density.worth[:, :LENGTHS] = np.arange(1, 1 + LENGTHS)
    policy._rerank()
    looked, leave = [], PrefixOrder.leave

    def count(self: PrefixOrder, slots: Slots) -> Slots:
        looked.append(slots)
        return leave(self, slots)

    monkeypatch.setattr(PrefixOrder, "leave", count)
    for at in range(50):
        looked.clear()
        manager.complete_store(manager.prepare_store([b"new %d" % at]))
        assert manager.readable(prompt).tolist() == [True] * (99 - at) + [False] * (at + 1)
        assert len(looked) <= 3
        manager.check_integrity()


def test_what_was_used_before_its_turn_came_does_not_leave_with_its_tail():
    policy = AutoPolicy(6)
    manager = CacheManager(policy)
    prompt = [b"a", b"b", b"c", b"d"]
    for at, key in enumerate(prompt):
        tokens = 5000 if at == 3 else 100 if at % 2 else 2000
        parent = prompt[at - 1] if at else None
        manager.complete_store(manager.offer([key], [Run(1, tokens, parent=parent)])[0])
    manager.complete_store(manager.offer([b"x", b"y"], [Run(2, 50_000)])[0])
    let_density_lead(policy)
    policy._density.worth[:, :LENGTHS] = np.arange(1, 1 + LENGTHS)
    policy._density.worth[:, LENGTHS:] = 100.0
    policy._rerank()
    manager.complete_store(manager.prepare_store([b"first"]))
    assert not manager.readable([b"d"]).any(), "its tail"
    manager.complete_load(manager.prepare_load([b"a", b"b", b"c"]))
    manager.complete_store(manager.prepare_store([b"second"]))
    assert manager.readable([b"a", b"b", b"c"]).all()
    manager.check_integrity()


def test_a_block_does_not_wait_for_itself_where_its_head_left_for_it():
    manager = CacheManager(AutoPolicy(2))
    manager.complete_store(manager.offer([b"head"], [Run(1, 100)])[0])
    manager.complete_store(manager.offer([b"other"], [Run(1, 100)])[0])
    slots, _ = manager.offer([b"a"], [Run(1, 100, parent=b"head")])
    assert not manager.readable([b"head"]).any()
    manager.complete_store(slots)
    for at in range(4):
        manager.complete_store(manager.offer([b"%d" % at], [Run(1, 100, must=True)])[0])
    manager.check_integrity()
    assert not manager.readable([b"a"]).any()


def test_conversations_that_do_not_fit_are_kept_as_well_as_by_recency():
    """30 agents whose prompts grow, on one system prompt, with room for a third of them."""
    rng, names = random.Random(1), iter(range(10**9))
    system = [next(names) for _ in range(8)]
    requests: list[TraceRequest] = []
    agents: list[list[int]] = [[] for _ in range(30)]
    for at in range(1200):
        place = rng.randrange(len(agents))
        if not agents[place] or rng.random() < 0.06:
            agents[place] = [*system]
        agents[place] = agents[place] + [next(names) for _ in range(rng.randint(1, 3))]
        ids = tuple(agents[place])
        requests.append(TraceRequest(at, 512 * len(ids), 1, ids))
    auto, lru = (replay(requests, name, 250).hit_ratio for name in ("auto", "lru"))
    assert auto > lru - 0.01


def test_what_was_used_once_is_mostly_not_worth_a_write_and_what_was_used_again_is():
    manager = warmed()
    kept = manager.readable_slots()
    hot = np.array([slot for key, slot in kept.items() if key.startswith(b"hot")], np.int32)
    cold = np.array([slot for key, slot in kept.items() if not key.startswith(b"hot")], np.int32)
    assert manager.policy.should_demote(hot).mean() > 0.9
    assert manager.policy.should_demote(cold).mean() < 0.1


def test_slots_that_were_used_again_are_told_once():
    manager = CacheManager(AutoPolicy(8))
    manager.complete_store(manager.prepare_store([b"a", b"b"]))
    assert manager.policy.take_newly_demotable().tolist() == []
    assert not manager.policy.has_newly_demotable
    manager.complete_load(manager.prepare_load([b"b"]))
    assert manager.policy.take_newly_demotable().tolist() == manager.slot_numbers([b"b"])
    assert manager.policy.take_newly_demotable().tolist() == []


def test_entries_of_hot_slots_do_not_pile_up():
    manager = CacheManager(AutoPolicy(NOTED_ACCESSES))
    keys = [b"%d" % at for at in range(NOTED_ACCESSES)]
    slots = manager.prepare_store(keys)
    manager.complete_store(slots)
    for _ in range(60):
        manager.policy.use(slots)
    manager.check_integrity()


def test_what_is_used_once_an_epoch_outlives_all_ages_and_what_is_not_is_still_evictable():
    policy = AutoPolicy(4)
    let_density_lead(policy)
    manager = CacheManager(policy)
    manager.complete_store(manager.prepare_store([b"old", b"used"]))
    for _ in range(MIN_EPOCH + 1):
        manager.policy.use(np.full(1, 1, np.int32))
    for epoch in range(AGES + 50):
        manager.policy.use(np.full(1, 1, np.int32))
        new = [b"%d %d" % (epoch, at) for at in range(MIN_EPOCH)]
        slots, _ = manager.offer(new, [Run(MIN_EPOCH, 100)])
        manager.complete_store(slots)
    manager.check_integrity()
    assert manager.readable([b"used"]).tolist() == [True]
    assert len(manager.prepare_store([b"a", b"b", b"c", b"d"])) == 4


@pytest.mark.parametrize("parts", rest_is_slow([1, 32]))
def test_scans_do_not_cost_conversations_their_hits(parts):
    """Conversations of eight turns, beside documents that are read once."""
    rng = random.Random(0)
    names = iter(range(10**9))
    requests, said = [], [[next(names)] for _ in range(8)]
    for at in range(1500):
        if at % 2:
            ids = [next(names) for _ in range(30)]
        else:
            place = rng.randrange(8)
            said[place] = said[place] + [next(names)] if len(said[place]) < 9 else [next(names)]
            ids = said[place]
        split = tuple(one * parts + part for one in ids for part in range(parts))
        requests.append(TraceRequest(at, 512 * len(ids), 1, split))
    auto, lru = (replay(requests, name, 60 * parts).hit_ratio for name in ("auto", "lru"))
    assert auto > lru + 0.02
