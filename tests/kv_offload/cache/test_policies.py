from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_offload.cache.policies import POLICIES, make_policy
from kv_offload.cache.policies.arc import ARCPolicy
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.policies.lru import LRUPolicy
from kv_offload.cache.slots import Slots
from kv_offload.errors import CapacityError


class PaperARC:
    """The algorithm of figure 4 of the paper, word for word, on plain lists (index 0: LRU)."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> int | None:
        """Access page x; return the page that left the cache."""
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return None
        if x in self.b1:  # case II
            delta = 1.0 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            victim = self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
            return victim
        if x in self.b2:  # case III
            delta = 1.0 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            victim = self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
            return victim
        victim = None  # case IV
        l1 = len(self.t1) + len(self.b1)
        l2 = len(self.t2) + len(self.b2)
        if l1 == self.c:  # case A
            if len(self.t1) < self.c:
                del self.b1[0]
                victim = self.replace(x)
            else:
                victim = self.t1.pop(0)
        elif l1 < self.c and l1 + l2 >= self.c:  # case B
            if l1 + l2 == 2 * self.c:
                del self.b2[0]
            victim = self.replace(x)
        self.t1.append(x)
        return victim

    def replace(self, x: int) -> int:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            victim = self.t1.pop(0)
            self.b1.append(victim)
        else:
            victim = self.t2.pop(0)
            self.b2.append(victim)
        return victim


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


class Named:
    """Lets a test name keys where a policy wants slots; gives them slots as the manager does."""

    def __init__(self, policy: EvictionPolicy, *keys: object) -> None:
        self.policy = policy
        self.slot_of: dict[object, int] = {}
        for key in keys:
            self.add(key)
            self.release(key)

    def add(self, key: object) -> None:
        slot = next(slot for slot in itertools.count() if slot not in self.slot_of.values())
        self.policy.add(slots(slot), [key])
        self.slot_of[key] = slot

    def replace(self, key: object) -> object:
        """Return the key that left, `None` if there was none."""
        replaced = self.policy.replace([key])
        if not len(replaced):
            return None
        (slot,) = replaced.tolist()
        victim = next(key for key in self.slot_of if self.slot_of[key] == slot)
        del self.slot_of[victim]
        self.slot_of[key] = slot
        self.check()
        return victim

    def victims(self, count: int) -> list[object]:
        """Evict `count` keys for newcomers that stay held."""
        return [self.replace(f"new {i}") for i in range(count)]

    def use(self, key: object) -> None:
        self.policy.use(slots(self.slot_of[key]))

    def hold(self, key: object) -> None:
        self.policy.hold(slots(self.slot_of[key]))

    def release(self, key: object) -> None:
        self.policy.release(slots(self.slot_of[key]))

    def discard(self, key: object) -> None:
        self.policy.discard(slots(self.slot_of.pop(key)))

    def is_held(self, key: object) -> bool:
        return self.policy.resident()[self.slot_of[key]]

    def check(self) -> None:
        self.policy.check_integrity()
        assert self.policy.resident().keys() == set(self.slot_of.values())

    def request(self, key: object) -> object:
        """Access a key as a cache does whose stores end at once; return the key that left."""
        victim = None
        if key in self.slot_of:
            self.use(key)
            return None
        if len(self.slot_of) < self.policy.capacity:
            self.add(key)
        else:
            victim = self.replace(key)
        self.release(key)
        return victim

    @property
    def arc_state(self) -> tuple[object, ...]:
        """T1, T2, B1, B2 from the least to the most recent, and p."""
        policy = self.policy
        assert isinstance(policy, ARCPolicy)
        t1, t2 = (
            [policy._key_of[slot] for slot in part.slots()] for part in (policy._t1, policy._t2)
        )
        b1, b2 = (
            [policy._ghost_at[place] for place in part.slots()] for part in (policy._b1, policy._b2)
        )
        return t1, t2, b1, b2, policy._target


def assert_same_as_paper(capacity: int, trace: Iterable[int]) -> None:
    paper, cache = PaperARC(capacity), Named(ARCPolicy(capacity))
    for x in trace:
        assert cache.request(x) == paper.request(x)
        assert cache.arc_state == (paper.t1, paper.t2, paper.b1, paper.b2, paper.p)
        cache.check()


def skewed_trace_with_scans(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    trace: list[int] = []
    while len(trace) < length:
        trace += [min(int(rng.paretovariate(0.7)), 60) for _ in range(rng.randrange(80))]
        start = rng.randrange(100, 200)
        trace += range(start, start + rng.randrange(30))
    return trace


def new(name: str, capacity: int, *keys: str) -> Named:
    return Named(make_policy(name, capacity), *keys)


each_policy = pytest.mark.parametrize("name", POLICIES)


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=150))
@settings(deadline=None, max_examples=150)
def test_arc_is_the_papers_algorithm_on_random_traces(capacity: int, trace: list[int]) -> None:
    assert_same_as_paper(capacity, trace)


@pytest.mark.parametrize("capacity", [1, 2, 7, 20, 50])
def test_arc_is_the_papers_algorithm_on_skewed_traces_with_scans(capacity: int) -> None:
    assert_same_as_paper(capacity, skewed_trace_with_scans(seed=capacity, length=4000))


def test_the_traces_move_the_target_both_ways() -> None:
    """The comparison with the paper would be worth little if p never left 0."""
    cache = Named(ARCPolicy(20))
    targets = []
    for x in skewed_trace_with_scans(seed=20, length=4000):
        cache.request(x)
        targets.append(cache.arc_state[-1])
    steps = {after - before for before, after in itertools.pairwise(targets)}
    assert min(steps) < 0 < max(steps)
    assert any(step % 1 for step in steps), "no step was weighted by the ghosts' ratio"


def test_make_policy_knows_all_names() -> None:
    assert {name: type(make_policy(name, 3)) for name in POLICIES} == {
        "lru": LRUPolicy,
        "arc": ARCPolicy,
    }
    assert make_policy("arc", 3).capacity == 3


@each_policy
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_policy_needs_capacity(name: str, capacity: int) -> None:
    with pytest.raises(CapacityError, match="1 or more"):
        make_policy(name, capacity)


@each_policy
def test_an_added_slot_is_held_until_its_release(name: str) -> None:
    policy = new(name, 2)
    policy.add("a")
    policy.add("b")
    assert policy.is_held("a")
    policy.release("b")
    assert not policy.is_held("b")
    assert policy.victims(1) == ["b"]


@each_policy
def test_replace_changes_nothing_where_all_slots_are_held(name: str) -> None:
    policy = new(name, 3, "a", "b")
    policy.hold("a")
    policy.hold("b")
    policy.add("c")
    assert policy.replace("new") is None
    policy.check()
    policy.release("b")
    assert policy.replace("new") == "b"


@each_policy
def test_a_held_slot_is_passed_over_however_old(name: str) -> None:
    policy = new(name, 4, "a", "b", "c", "d")
    policy.hold("a")
    policy.hold("b")
    for key in "cd":
        policy.use(key)
    assert policy.victims(3) == ["c", "d", None]
    policy.check()


@each_policy
def test_hold_and_use_are_accesses_and_release_is_not(name: str) -> None:
    policy = new(name, 4, "a", "b", "c", "d")
    for key in "dcba":
        policy.use(key)
    policy.hold("d")
    policy.hold("c")
    policy.use("b")
    policy.release("c")
    policy.release("d")
    assert policy.victims(4) == ["a", "d", "c", "b"]


@each_policy
def test_held_slots_return_to_their_place_after_a_victim_was_sought_past_them(name: str) -> None:
    policy = new(name, 5, "e", "d", "c", "b", "a")
    for key in "cba":  # a prefix whose head is the most recent, older than d and e
        policy.hold(key)
    for key in "de":
        policy.use(key)
    assert policy.replace("one more") == "d"
    for key in "abc":  # head first, as slices complete
        policy.release(key)
        policy.check()
    assert policy.victims(4) == ["c", "b", "a", "e"]


@each_policy
def test_a_slot_used_after_a_victim_was_sought_past_it_becomes_recent(name: str) -> None:
    policy = new(name, 4, "a", "b", "c", "d")
    policy.hold("a")
    for key in "bcd":
        policy.use(key)
    assert policy.replace("one more") == "b"
    policy.use("a")
    assert policy.is_held("a")
    policy.release("a")
    assert policy.victims(3) == ["c", "d", "a"]


@each_policy
def test_discard_forgets_a_slot_held_or_not(name: str) -> None:
    policy = new(name, 3, "a", "b", "c")
    policy.hold("a")
    policy.discard("a")
    policy.discard("b")
    policy.check()
    policy.add("a")
    policy.check()
    assert policy.victims(2) == ["c", None]


@each_policy
def test_discard_of_a_held_slot_that_a_victim_was_sought_past(name: str) -> None:
    policy = new(name, 2, "a", "b")
    policy.hold("a")
    policy.use("b")
    assert policy.replace("c") == "b"
    policy.discard("a")
    policy.check()


@each_policy
def test_clear_forgets_everything(name: str) -> None:
    policy = new(name, 2, "a", "b")
    policy.hold("a")
    policy.policy.clear()
    assert policy.policy.resident() == {}
    again = Named(policy.policy, "a")
    again.check()
    assert again.victims(2) == ["a", None]


@each_policy
def test_slots_may_be_added_in_any_order(name: str) -> None:
    policy = make_policy(name, 8)
    for slot in (5, 2, 7):
        policy.add(slots(slot), [f"key {slot}"])
        policy.release(slots(slot))
        policy.check_integrity()
    assert policy.resident() == {5: False, 2: False, 7: False}
    assert [policy.replace([f"new {i}"]).tolist() for i in range(4)] == [[5], [2], [7], []]


@each_policy
def test_check_integrity_refuses_too_many_slots(name: str) -> None:
    policy = new(name, 2, "a", "b").policy
    policy.capacity = 1
    with pytest.raises(AssertionError, match="2 slots exceed capacity 1"):
        policy.check_integrity()


def test_arc_keeps_reused_keys_through_a_scan_and_lru_does_not() -> None:
    kept = {}
    for name in POLICIES:
        cache = new(name, 10)
        for x in [*range(5), *range(5), *range(100, 200)]:
            cache.request(x)
        kept[name] = set(range(5)) <= cache.slot_of.keys()
    assert kept == {"lru": False, "arc": True}


def test_arc_does_not_count_a_use_before_the_first_release_as_reuse() -> None:
    policy = new("arc", 2)
    policy.add("a")
    policy.use("a")
    policy.release("a")
    assert policy.arc_state[:2] == (["a"], [])
    policy.use("a")
    assert policy.arc_state[:2] == ([], ["a"])


def test_arc_sees_the_return_of_a_key_as_reuse_also_into_a_free_place() -> None:
    policy = new("arc", 2, "a", "b")
    policy.use("b")
    assert policy.replace("c") == "a"
    policy.discard("c")
    policy.add("a")
    assert policy.arc_state == ([], ["b", "a"], [], [], 1.0)


def test_arc_forgets_the_oldest_ghosts_also_when_it_fills_a_free_place() -> None:
    policy = new("arc", 2, "a", "b")
    policy.use("b")
    assert policy.replace("c") == "a"
    policy.release("c")
    policy.discard("b")
    policy.add("d")
    policy.check()
    assert policy.arc_state == (["c", "d"], [], [], [], 0.0)


def test_arc_keeps_no_ghost_of_a_discarded_key() -> None:
    policy = new("arc", 2, "a", "b")
    policy.discard("a")
    policy.add("a")
    assert policy.arc_state == (["b", "a"], [], [], [], 0.0)


def test_arc_keeps_no_ghosts_and_no_target_after_clear() -> None:
    policy = new("arc", 2, "a", "b")
    policy.use("b")
    policy.replace("c")
    policy.release("c")
    policy.replace("a")
    assert policy.arc_state[-1] == 1.0
    policy.policy.clear()
    assert policy.arc_state == ([], [], [], [], 0.0)


def test_arc_evicts_from_the_other_list_where_the_chosen_one_is_held() -> None:
    policy = new("arc", 3, "a", "b")
    policy.use("a")
    policy.use("b")
    policy.add("c")  # held: T1 exceeds its target of 0, but cannot give a victim
    assert policy.replace("d") == "a"
    assert policy.arc_state[:2] == (["c", "d"], ["b"])
    policy.release("c")
    policy.release("d")
    assert policy.replace("e") == "c"
    assert policy.replace("c") == "d"
    policy.release("e")
    policy.hold("b")  # with c: T1 is not above its target, but T2 cannot give a victim
    assert policy.arc_state == (["e"], ["c", "b"], ["d"], ["a"], 1.0)
    assert policy.replace("f") == "e"


def test_arc_bounds_its_ghosts_where_it_evicts_before_it_is_full() -> None:
    """After a reset orphaned slots are busy: fewer slots than the capacity hold all keys."""
    policy = new("arc", 8, "k0")
    for i in range(40):
        policy.use(f"k{i}")
        assert policy.replace(f"k{i + 1}") == f"k{i}"
        policy.release(f"k{i + 1}")
    assert policy.arc_state[2:4] == ([], [f"k{i}" for i in range(32, 40)])


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("arc._t1.append(1, held=False)", "a slot is in T1 and in T2"),
        ("arc._remember(arc._b1, 'b')", "a key is in two of"),
        ("for key in 'wxyz': arc._remember(arc._b1, key)", "L1 has 5 keys and exceeds 4"),
        ("for key in 'vwxyz': arc._remember(arc._b2, key)", "5 ghosts exceed capacity 4"),
        ("arc._target = 4.5", "p is 4.5, not 0..4"),
        ("arc._t1.evictable += 1", "2 slots count as evictable, but 1 are"),
        ("arc._place_of['x'] = 0", "a ghost is lost"),
        ("arc._remember(arc._b2, 'x'); arc._ghost_at[0] = 'y'", "a ghost is lost"),
        ("arc._ghost_at.append('x')", "a place is lost"),
    ],
)
def test_arc_check_integrity_names_what_is_broken(breakage: str, message: str) -> None:
    policy = new("arc", 4, "a", "b", "c")
    policy.use("b")
    policy.discard("c")
    policy.check()
    exec(breakage, {"arc": policy.policy})
    with pytest.raises(AssertionError, match=message):
        policy.policy.check_integrity()
