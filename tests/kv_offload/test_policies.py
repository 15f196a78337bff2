from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_offload.errors import CapacityError, ConfigError
from kv_offload.policies import POLICIES, ARCPolicy, EvictionPolicy, LRUPolicy, make_policy
from kv_offload.policies.recency import RecencyList


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


class PlainLRU:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[int] = []

    def request(self, x: int) -> int | None:
        victim = None
        if x in self.keys:
            self.keys.remove(x)
        elif len(self.keys) == self.capacity:
            victim = self.keys.pop(0)
        self.keys.append(x)
        return victim


class PolicyCache:
    """Drives a policy as the manager does, without holds that outlast an access."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.resident: set[int] = set()

    def request(self, x: int) -> int | None:
        victim = None
        if x in self.resident:
            self.policy.use(x)
            return None
        if len(self.resident) < self.policy.capacity:
            self.policy.add(x)
        else:
            victim = self.policy.replace(x)
            assert isinstance(victim, int)
            self.resident.remove(victim)
        self.policy.release(x)
        self.resident.add(x)
        return victim


def state(policy: ARCPolicy) -> tuple[object, ...]:
    b1, b2 = list(policy._b1), list(policy._b2)
    return policy._t1.keys(), policy._t2.keys(), b1, b2, policy._target


def assert_same_as_paper(capacity: int, trace: Iterable[int]) -> None:
    paper, policy = PaperARC(capacity), ARCPolicy(capacity)
    cache = PolicyCache(policy)
    for x in trace:
        assert cache.request(x) == paper.request(x)
        assert state(policy) == (paper.t1, paper.t2, paper.b1, paper.b2, paper.p)
        policy.check_integrity()


def skewed_trace_with_scans(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    trace: list[int] = []
    while len(trace) < length:
        trace += [min(int(rng.paretovariate(0.7)), 60) for _ in range(rng.randrange(80))]
        start = rng.randrange(100, 200)
        trace += range(start, start + rng.randrange(30))
    return trace


def filled(policy: EvictionPolicy, *keys: str) -> EvictionPolicy:
    for key in keys:
        policy.add(key)
        policy.release(key)
    return policy


def victims(policy: EvictionPolicy, count: int) -> list[object]:
    """Evict `count` keys for newcomers that stay held."""
    return [policy.replace(f"new {i}") for i in range(count)]


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
    policy = ARCPolicy(20)
    cache = PolicyCache(policy)
    targets = []
    for x in skewed_trace_with_scans(seed=20, length=4000):
        cache.request(x)
        targets.append(policy._target)
    steps = {after > before for before, after in zip(targets, targets[1:], strict=False)}
    assert steps == {True, False}
    assert any(target % 1 for target in targets), "no step was weighted by the ghosts' ratio"


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=150))
@settings(deadline=None, max_examples=50)
def test_lru_evicts_the_least_recently_used(capacity: int, trace: list[int]) -> None:
    plain, cache = PlainLRU(capacity), PolicyCache(LRUPolicy(capacity))
    for x in trace:
        assert cache.request(x) == plain.request(x)
        cache.policy.check_integrity()


def test_make_policy_knows_all_names() -> None:
    assert {name: type(make_policy(name, 3)) for name in POLICIES} == {
        "lru": LRUPolicy,
        "arc": ARCPolicy,
    }
    assert make_policy("arc", 3).capacity == 3


def test_make_policy_refuses_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="unknown eviction policy 'fifo': choose from lru, arc"):
        make_policy("fifo", 3)


@each_policy
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_policy_needs_capacity(name: str, capacity: int) -> None:
    with pytest.raises(CapacityError, match="1 or more"):
        make_policy(name, capacity)


@each_policy
def test_an_added_key_is_held_until_its_release(name: str) -> None:
    policy = make_policy(name, 2)
    policy.add("a")
    policy.add("b")
    assert len(policy) == 2
    assert policy.is_held("a")
    policy.release("b")
    assert not policy.is_held("b")
    assert victims(policy, 1) == ["b"]


@each_policy
def test_replace_changes_nothing_where_all_keys_are_held(name: str) -> None:
    policy = filled(make_policy(name, 3), "a", "b")
    policy.hold("a")
    policy.hold("b")
    policy.add("c")
    assert policy.replace("new") is None
    assert len(policy) == 3
    with pytest.raises(KeyError):
        policy.is_held("new")
    policy.check_integrity()
    policy.release("b")
    assert policy.replace("new") == "b"


@each_policy
def test_a_held_key_is_passed_over_however_old(name: str) -> None:
    policy = filled(make_policy(name, 4), "a", "b", "c", "d")
    for key in "abcd":
        policy.use(key)
    policy.hold("a")
    policy.hold("b")
    for key in "cd":
        policy.use(key)
    assert victims(policy, 2) == ["c", "d"]
    assert policy.replace("e") is None
    policy.check_integrity()


@each_policy
def test_hold_and_use_are_accesses_and_release_is_not(name: str) -> None:
    policy = filled(make_policy(name, 4), "a", "b", "c", "d")
    for key in "dcba":
        policy.use(key)
    policy.hold("d")
    policy.hold("c")
    policy.use("b")
    policy.release("c")
    policy.release("d")
    assert victims(policy, 4) == ["a", "d", "c", "b"]


@each_policy
def test_a_held_key_returns_to_its_place_after_a_victim_was_sought_past_it(name: str) -> None:
    policy = filled(make_policy(name, 5), "e", "d", "c", "b", "a")
    for key in "cba":  # a prefix whose head is the most recent, older than d and e
        policy.hold(key)
    for key in "de":
        policy.use(key)
    assert policy.replace("new") == "d"
    for key in "abc":  # head first, as slices complete
        policy.release(key)
        policy.check_integrity()
    assert [policy.replace(f"newer {i}") for i in range(4)] == ["c", "b", "a", "e"]


@each_policy
def test_a_key_used_while_a_victim_is_sought_past_it_becomes_recent(name: str) -> None:
    policy = filled(make_policy(name, 4), "a", "b", "c", "d")
    policy.hold("a")
    for key in "bcd":
        policy.use(key)
    assert policy.replace("new") == "b"
    assert policy.is_held("a")
    policy.use("a")
    assert policy.is_held("a")
    policy.release("a")
    assert [policy.replace(f"newer {i}") for i in range(3)] == ["c", "d", "a"]
    policy.check_integrity()


@each_policy
def test_discard_forgets_a_key_held_or_not(name: str) -> None:
    policy = filled(make_policy(name, 3), "a", "b", "c")
    policy.hold("a")
    policy.discard("a")
    policy.discard("b")
    assert len(policy) == 1
    policy.add("a")
    policy.check_integrity()
    assert policy.replace("d") == "c"


@each_policy
def test_discard_of_a_held_key_that_a_victim_was_sought_past(name: str) -> None:
    policy = filled(make_policy(name, 2), "a", "b")
    policy.hold("a")
    policy.use("b")
    assert policy.replace("c") == "b"
    policy.discard("a")
    assert len(policy) == 1
    policy.check_integrity()


@each_policy
def test_clear_forgets_everything(name: str) -> None:
    policy = filled(make_policy(name, 2), "a", "b")
    policy.hold("a")
    policy.clear()
    assert len(policy) == 0
    policy.add("a")
    assert policy.is_held("a")
    policy.check_integrity()


@each_policy
@pytest.mark.parametrize("operation", ["use", "hold", "release", "discard", "is_held"])
def test_operations_refuse_a_key_that_is_not_resident(name: str, operation: str) -> None:
    policy = filled(make_policy(name, 2), "a", "b", "c")
    policy.replace("d")  # where the policy keeps ghosts, a is one
    for key in ("a", "never seen"):
        with pytest.raises(KeyError):
            getattr(policy, operation)(key)


@each_policy
def test_check_integrity_names_what_is_broken(name: str) -> None:
    policy = filled(make_policy(name, 2), "a", "b")
    policy.capacity = 1
    with pytest.raises(AssertionError, match="2 keys exceed capacity 1"):
        policy.check_integrity()


def test_arc_keeps_reused_keys_through_a_scan_and_lru_does_not() -> None:
    kept = {}
    for name in POLICIES:
        cache = PolicyCache(make_policy(name, 10))
        for x in [*range(5), *range(5), *range(100, 200)]:
            cache.request(x)
        kept[name] = set(range(5)) <= cache.resident
    assert kept == {"lru": False, "arc": True}


def test_arc_does_not_count_a_use_before_the_first_release_as_reuse() -> None:
    policy = ARCPolicy(2)
    policy.add("a")
    policy.use("a")
    policy.release("a")
    assert state(policy)[:2] == (["a"], [])
    policy.use("a")
    assert state(policy)[:2] == ([], ["a"])


def test_arc_sees_the_return_of_a_key_as_reuse_also_into_a_free_place() -> None:
    policy = ARCPolicy(2)
    filled(policy, "a", "b")
    policy.use("b")
    assert policy.replace("c") == "a"
    policy.discard("c")
    policy.add("a")
    assert state(policy) == ([], ["b", "a"], [], [], 1.0)


def test_arc_keeps_no_ghost_of_a_discarded_key() -> None:
    policy = ARCPolicy(2)
    filled(policy, "a", "b")
    policy.discard("a")
    filled(policy, "a")
    assert state(policy) == (["b", "a"], [], [], [], 0.0)


def test_arc_keeps_no_ghosts_and_no_target_after_clear() -> None:
    policy = ARCPolicy(2)
    filled(policy, "a", "b")
    policy.use("b")
    policy.replace("c")
    policy.release("c")
    policy.replace("a")
    assert policy._target == 1.0
    policy.clear()
    assert state(policy) == ([], [], [], [], 0.0)


def test_arc_evicts_from_the_other_list_where_the_chosen_one_is_held() -> None:
    policy = ARCPolicy(3)
    filled(policy, "a", "b")
    policy.use("a")
    policy.use("b")
    policy.add("c")  # held: T1 exceeds its target of 0, but cannot give a victim
    assert policy.replace("d") == "a"
    policy.check_integrity()
    policy.release("d")
    policy.hold("b")
    policy._target = 3.0  # T1 is below its target, but T2 cannot give a victim
    assert policy.replace("e") == "d"
    policy.check_integrity()


def test_arc_bounds_its_ghosts_where_it_evicts_before_it_is_full() -> None:
    """After a reset orphaned slots are busy: fewer keys than the capacity fill the rest."""
    policy = ARCPolicy(8)
    filled(policy, "a")
    for i in range(40):
        policy.use("a" if i == 0 else f"{i - 1}")
        assert policy.replace(f"{i}") is not None
        policy.release(f"{i}")
        policy.check_integrity()
    assert len(policy._b2) == 8


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("policy._b1['b'] = None", "a key is in two of"),
        ("policy._b1.update(dict.fromkeys('xyz'))", "L1 exceeds"),
        ("policy._b2.update(dict.fromkeys('vwxyz'))", "ghosts exceed"),
        ("policy._target = 4.5", "target 4.5 is outside"),
        ("policy._t1._held += 1", "counted as held"),
    ],
)
def test_arc_check_integrity_names_what_is_broken(breakage: str, message: str) -> None:
    policy = filled(ARCPolicy(4), "a", "b")
    exec(breakage, {"policy": policy})
    with pytest.raises(AssertionError, match=message):
        policy.check_integrity()


def test_recency_list_passes_a_held_key_once() -> None:
    keys = RecencyList()
    for i in range(100):
        keys.append(i, held=i < 90)
    assert [keys.pop_oldest() for _ in range(3)] == [90, 91, 92]
    assert list(keys._listed) == [93, 94, 95, 96, 97, 98, 99]
    assert (len(keys), keys.evictable) == (97, 7)
    assert 0 in keys
    for i in range(89, -1, -1):
        keys.release(i)
    assert [keys.pop_oldest() for _ in range(97)] == [*range(90), *range(93, 100)]


def test_recency_list_allows_a_second_hold_and_release() -> None:
    keys = RecencyList()
    keys.append("a", held=False)
    keys.hold("a")
    keys.hold("a")
    keys.check_integrity()
    assert keys.evictable == 0
    keys.release("a")
    keys.release("a")
    keys.check_integrity()
    assert keys.evictable == 1


def test_recency_list_check_integrity_finds_a_key_in_two_places() -> None:
    keys = RecencyList()
    keys.append("a", held=False)
    keys._parked.add("a")
    with pytest.raises(AssertionError, match=r"both listed and parked: \[\"'a'\"\]"):
        keys.check_integrity()
