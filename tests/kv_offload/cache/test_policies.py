"""Every policy by example, and ARC beside the algorithm of its paper."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_offload.cache.policies import POLICIES, make_policy
from kv_offload.cache.policies.arc import ARCPolicy
from kv_offload.cache.policies.base import EvictionPolicy
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
        self.check()

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

    def use(self, *keys: object) -> None:
        for key in keys:
            self.policy.use(slots(self.slot_of[key]))

    def hold(self, *keys: object) -> None:
        for key in keys:
            self.policy.use(slots(self.slot_of[key]))
            self.policy.keep(slots(self.slot_of[key]))

    def release(self, *keys: object) -> None:
        for key in keys:
            self.policy.release(slots(self.slot_of[key]))
            self.check()

    def discard(self, key: object) -> None:
        self.policy.discard(slots(self.slot_of.pop(key)))
        self.check()

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


def assert_same_as_paper(capacity: int, trace: Iterable[int]) -> set[float]:
    """Return by how much p was moved."""
    paper, cache = PaperARC(capacity), Named(ARCPolicy(capacity))
    moves = set()
    for x in trace:
        before = paper.p
        assert cache.request(x) == paper.request(x)
        assert cache.arc_state == (paper.t1, paper.t2, paper.b1, paper.b2, paper.p)
        moves.add(paper.p - before)
    return moves


def skewed_trace_with_scans(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    trace: list[int] = []
    while len(trace) < length:
        trace += [min(int(rng.paretovariate(0.7)), 60) for _ in range(rng.randrange(80))]
        start = rng.randrange(100, 200)
        trace += range(start, start + rng.randrange(30))
    return trace


# -- ARC and its paper ---------------------------------------------------------------------------


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=150))
@settings(deadline=None, max_examples=150)
def test_arc_is_the_papers_algorithm_on_random_traces(capacity: int, trace: list[int]) -> None:
    assert_same_as_paper(capacity, trace)


@pytest.mark.parametrize("capacity", [1, 7, 20, 50])
def test_arc_is_the_papers_algorithm_on_skewed_traces_with_scans(capacity: int) -> None:
    moves = assert_same_as_paper(capacity, skewed_trace_with_scans(seed=capacity, length=4000))
    if capacity == 20:
        assert min(moves) < 0 < max(moves), "the control: p went both ways"
        assert any(move % 1 for move in moves), "and was weighted by the ghosts' ratio"


# -- every policy --------------------------------------------------------------------------------


@pytest.fixture(params=POLICIES)
def new(request: pytest.FixtureRequest) -> Callable[..., Named]:
    return lambda capacity, *keys: Named(make_policy(request.param, capacity), *keys)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_policy_needs_capacity(new: Callable[..., Named], capacity: int) -> None:
    with pytest.raises(CapacityError, match="1 or more"):
        new(capacity)


def test_a_held_slot_is_not_evicted_however_old(new: Callable[..., Named]) -> None:
    policy = new(5, "a", "b", "c", "d")
    policy.add("new and not released")
    policy.hold("a", "b")
    policy.use("c", "d")
    assert policy.victims(3) == ["c", "d", None]
    policy.release("b")
    assert policy.replace("one more") == "b"


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_held_slots_that_a_search_for_a_victim_has_passed_return_to_their_place_or_become_recent(
    name: str,
) -> None:
    policy = Named(make_policy(name, 6), "u", "e", "d", "c", "b", "a")
    policy.hold(*"cbau")  # a prefix whose head is the most recent, older than d and e
    policy.use("d", "e")
    assert policy.replace("one more") == "d"
    policy.use("u")
    policy.release(*"abcu")  # head first, as slices complete
    assert policy.victims(5) == ["c", "b", "a", "e", "u"]


def test_discard_and_clear_forget_slots_held_or_not(new: Callable[..., Named]) -> None:
    policy = new(4, "a", "b", "c", "d")
    policy.hold("a", "b")
    policy.use("c", "d")
    assert policy.replace("e") == "c", "a and b were passed"
    policy.discard("a")
    policy.discard("d")
    assert policy.victims(1) == [None]
    policy.policy.clear()
    assert policy.policy.resident() == {}
    again = Named(policy.policy, "a")
    assert again.victims(2) == ["a", None]


# -- ARC with holds and discards, of which the paper has none ------------------------------------


def arc(capacity: int, *keys: str) -> Named:
    return Named(ARCPolicy(capacity), *keys)


def test_arc_keeps_reused_keys_through_a_scan_and_lru_does_not() -> None:
    kept = {}
    for name in ("lru", "arc"):
        cache = Named(make_policy(name, 10))
        for x in [*range(5), *range(5), *range(100, 200)]:
            cache.request(x)
        kept[name] = set(range(5)) <= cache.slot_of.keys()
    assert kept == {"lru": False, "arc": True}


def test_arc_does_not_count_a_use_before_the_first_release_as_reuse() -> None:
    policy = arc(2)
    policy.add("a")
    policy.use("a")
    policy.release("a")
    assert policy.arc_state[:2] == (["a"], [])
    policy.use("a")
    assert policy.arc_state[:2] == ([], ["a"])


def test_arc_sees_the_return_of_an_evicted_key_as_reuse_and_that_of_a_discarded_one_not() -> None:
    policy = arc(2, "a", "b")
    policy.use("b")
    assert policy.replace("c") == "a"
    policy.discard("c")
    policy.add("a")
    assert policy.arc_state == ([], ["b", "a"], [], [], 1.0)
    policy.discard("b")
    policy.add("b")
    assert policy.arc_state == (["b"], ["a"], [], [], 1.0)
    policy.policy.clear()
    assert policy.arc_state == ([], [], [], [], 0.0)


def test_arc_bounds_its_ghosts_where_it_evicts_before_it_is_full() -> None:
    """After a reset orphaned slots are busy: fewer slots than the capacity hold all keys."""
    policy = arc(8, "k0")
    for i in range(40):
        policy.use(f"k{i}")
        assert policy.replace(f"k{i + 1}") == f"k{i}"
        policy.release(f"k{i + 1}")
    assert policy.arc_state[2:4] == ([], [f"k{i}" for i in range(32, 40)])
