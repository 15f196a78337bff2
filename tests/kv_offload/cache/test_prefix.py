from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_offload.cache.prefix import (
    FIRST_LOOKUP_SLOTS,
    LOOKUP_GROWTH,
    CacheGroup,
    PrefixMap,
    Readable,
)
from kv_offload.errors import UnsupportedError
from tests.support.slow import rest_is_slow


def make_key(block_hash: bytes, group_id: int) -> bytes:
    return block_hash + b" of group %d" % group_id


def slot_key(block_hash: bytes, group_id: int) -> bytes:
    return make_key(block_hash, group_id) if group_id else block_hash


def among(keys: Collection[bytes]) -> Readable:
    return lambda asked: np.array([key in keys for key in asked], bool)


def make_hashes(count: int) -> list[bytes]:
    return [b"hash %d" % i for i in range(count)]


def make_map(*groups: CacheGroup, hash_block_tokens: int | None = None) -> PrefixMap:
    tokens = hash_block_tokens or math.gcd(*(group.block_tokens for group in groups))
    return PrefixMap(groups, tokens, make_key)


@dataclass(frozen=True)
class Case:
    """A random question: which of `missing` slots, by group and index, host memory lacks."""

    prefixes: PrefixMap
    hashes: list[bytes]
    hash_block_tokens: int
    missing: frozenset[tuple[int, int]]
    start: int
    limit: int

    @property
    def readable_keys(self) -> set[bytes]:
        keys = set()
        for group in self.prefixes.groups:
            for slot in range(len(self.hashes) * self.hash_block_tokens // group.block_tokens):
                if (group.group_id, slot) not in self.missing:
                    last_hash = (slot + 1) * group.block_tokens // self.hash_block_tokens - 1
                    keys.add(slot_key(self.hashes[last_hash], group.group_id))
        return keys

    def blocks_read(self, group: CacheGroup, end: int) -> set[int]:
        """Return the blocks beyond the start that a query at position `end` reads, token by token.

        It reads itself and the `window_tokens - 1` tokens before it, or those of its own chunk, or
        the state after the last token before it.
        """
        if group.holds_state:
            return {(end - 1) // group.block_tokens} if end > self.start else set()
        window, chunk = group.window_tokens, group.chunk_tokens
        return {
            token // group.block_tokens
            for token in range(self.start, end)
            if (window is None or token > end - window)
            and (chunk is None or token // chunk == end // chunk)
        }

    def is_served(self, end: int) -> bool:
        hashed_tokens = len(self.hashes) * self.hash_block_tokens
        for group in self.prefixes.groups:
            needed = self.blocks_read(group, end)
            if group.sees_next_token:
                needed.add(end // group.block_tokens)
            for block in needed:
                exists = (block + 1) * group.block_tokens <= hashed_tokens
                if not exists or (group.group_id, block) in self.missing:
                    return False
        return True

    def longest_hit(self) -> int:
        """Try every aligned end, from the limit downwards."""
        alignment = math.lcm(*(group.block_tokens for group in self.prefixes.groups))
        for end in range(self.limit, self.start, -1):
            if end % alignment == 0 and self.is_served(end):
                return end
        return self.start


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw small cases: with many slots, hardly any hit would be neither empty nor everything."""
    sizes = draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3))
    rules = st.one_of(
        st.fixed_dictionaries({"window_tokens": st.sampled_from([1, 2, 3, 4, 5, 7, 9, 13, 40])}),
        st.fixed_dictionaries({"chunk_tokens": st.sampled_from([1, 3, 4, 6, 8, 10, 24])}),
        st.just({"holds_state": True}),
        st.just({}),
    )
    groups = [
        CacheGroup(i, tokens, **draw(rules), sees_next_token=draw(st.booleans()))
        for i, tokens in enumerate(sizes)
    ]
    divisors = [d for d in range(1, math.gcd(*sizes) + 1) if math.gcd(*sizes) % d == 0]
    hash_block_tokens = draw(st.sampled_from(divisors))
    prefixes = PrefixMap(groups, hash_block_tokens, make_key)
    num_tokens = draw(st.integers(0, min(6 * prefixes.alignment_tokens, 100)))
    slots = [
        (group.group_id, slot)
        for group in groups
        for slot in range(num_tokens // group.block_tokens)
    ]
    some = draw(st.sets(st.sampled_from(slots), max_size=6)) if slots else set()
    missing = some if draw(st.integers(0, 3)) else set(slots) - some
    start = draw(st.integers(0, num_tokens // prefixes.alignment_tokens))
    return Case(
        prefixes,
        make_hashes(num_tokens // hash_block_tokens),
        hash_block_tokens,
        frozenset(missing),
        draw(st.sampled_from([0, start])) * prefixes.alignment_tokens,
        draw(st.sampled_from([num_tokens, max(0, num_tokens - 1), num_tokens // 2])),
    )


@pytest.mark.parametrize("examples", rest_is_slow([250, 1000]))
def test_the_longest_hit_is_what_brute_force_finds(examples):
    @settings(deadline=None, max_examples=examples)
    @given(cases())
    def check(case):
        readable = among(case.readable_keys)
        found, _ = case.prefixes.longest_hits(case.hashes, readable, case.start, case.limit)
        assert found == case.longest_hit()

    check()


@given(cases())
def test_a_hit_loads_exactly_the_blocks_that_are_read(case):
    alignment = case.prefixes.alignment_tokens
    for end in range(alignment * (case.start // alignment + 1), case.limit + 1, alignment):
        for group in case.prefixes.groups:
            needed = case.prefixes.needed_slots(group, case.start, end)
            assert set(needed) == case.blocks_read(group, end)
        if case.is_served(end):
            keys = case.prefixes.needed_keys(case.hashes, case.start, end)
            assert set(keys) <= case.readable_keys
            assert len(set(keys)) == len(keys) == case.prefixes.count_slots(case.start, end)


@st.composite
def tails(draw: st.DrawFn) -> tuple[PrefixMap, list[bytes], set[bytes], int]:
    """Draw a hybrid model, the hashes of a text, keys that host memory has, and a limit."""
    tokens, per_block = draw(st.sampled_from([2, 4])), draw(st.sampled_from([3, 4]))
    proof = draw(st.booleans())
    groups = [
        CacheGroup(0, tokens * per_block, sees_next_token=proof),
        CacheGroup(1, tokens * per_block, holds_state=True),
    ]
    prefixes = PrefixMap(groups, tokens, make_key)
    hashes = make_hashes(draw(st.integers(0, 16)))
    keys = {key for group in groups for key in prefixes.slot_keys(hashes, group, 0, 9)}
    for end in range(tokens, (len(hashes) - proof) * tokens + 1, tokens):
        keys |= {key for group in groups for key in prefixes.tail_keys(hashes, group, end)}
    gone = draw(st.sets(st.sampled_from(sorted(keys)), max_size=6)) if keys else set()
    limit = draw(st.sampled_from([len(hashes), len(hashes) // 2])) * tokens
    return prefixes, hashes, keys - gone, max(0, limit - draw(st.integers(0, 1)))


@given(tails())
def test_a_hit_ends_inside_a_block_where_all_that_is_read_is_there(case):
    prefixes, hashes, keys, limit = case
    block, step = prefixes.alignment_tokens, prefixes.tail_tokens
    proof = prefixes.proof_tokens // step

    def is_served(end: int) -> bool:
        """Return whether attention has all blocks up to `end` and a proof, and there is a state."""
        has = [hashes[i - 1] in keys for i in range(block // step, end // step + 1, block // step)]
        proved = end // step + proof
        if end % block:
            has += [proved <= len(hashes) and hashes[proved - 1] in keys]
        elif proof:
            next_end = (end + block) // step
            has += [next_end <= len(hashes) and hashes[next_end - 1] in keys]
        return all(has) and slot_key(hashes[end // step - 1], 1) in keys

    found, full = prefixes.longest_hits(hashes, among(keys), 0, limit)
    served = [0, *(end for end in range(step, limit + 1, step) if is_served(end))]
    # An end that saves less than a block beyond whole ones is not looked for further back.
    known = [end for end in served if end % block == 0 or end > full - block]
    assert found == max(known)


FULL = CacheGroup(0, 4)
HASHES = make_hashes(8)


@pytest.mark.parametrize("hashes", [1, 2, 4])
def test_a_slot_is_named_by_the_last_hash_of_its_block_and_by_any_group_but_the_first(hashes):
    first_group, second_group = CacheGroup(0, 4 * hashes), CacheGroup(1, 4 * hashes, 6)
    prefixes = make_map(first_group, second_group, hash_block_tokens=4)
    last_hashes = HASHES[hashes - 1 :: hashes]
    slots = len(last_hashes)
    for group in (first_group, second_group):
        names = [make_key(block_hash, group.group_id) for block_hash in last_hashes]
        suffix = prefixes.pool_key_suffix[group.group_id]
        found = prefixes.slot_keys(HASHES, group, 0, slots)
        assert [key + suffix for key in found] == names
        keys = names if group.group_id else last_hashes
        for first in range(slots):
            assert prefixes.slot_keys(HASHES, group, first, slots) == keys[first:]
        assert prefixes.slot_keys(HASHES[:-1], group, 0, slots) == keys[:-1], "no hash, no key"


def test_keys_that_do_not_begin_with_the_hash_are_refused():
    with pytest.raises(UnsupportedError, match="builds its block keys in an unknown way"):
        PrefixMap([FULL], 4, lambda block_hash, group_id: b"%d " % group_id + block_hash)


def test_needed_keys_are_in_prefix_order_group_by_group():
    window = CacheGroup(1, 4, 6)
    expected: Sequence[bytes] = [*HASHES[1:5], *(make_key(HASHES[block], 1) for block in (3, 4))]
    assert make_map(FULL, window).needed_keys(HASHES, 4, 20) == expected


MANY = make_hashes(400)


def look_up(group: CacheGroup, known: Collection[int]) -> tuple[int, list[Sequence[bytes]]]:
    """Return the hit of a prompt of which these blocks are known, and what was asked for it."""
    asked: list[Sequence[bytes]] = []

    def readable(keys: Sequence[bytes]) -> NDArray[np.bool_]:
        asked.append(keys)
        return np.array([MANY.index(key) in known for key in keys], bool)

    return make_map(group).longest_hits(MANY, readable, 0, 4 * len(MANY))[0], asked


@pytest.mark.parametrize("missing", [0, 7, 8, 39, 40, 41, 99])
def test_few_slots_are_looked_up_behind_the_first_that_is_missing(missing):
    hit, asked = look_up(FULL, {*range(len(MANY))} - {missing})
    assert hit == 4 * missing
    keys = [*chain.from_iterable(asked)]
    assert keys == MANY[: len(keys)]
    assert len(keys) <= FIRST_LOOKUP_SLOTS + (LOOKUP_GROWTH + 1) * missing


@pytest.mark.parametrize(
    "kept", [range(0), range(7, 12), range(60, 100), range(0, 400, 2)], ids=str
)
@pytest.mark.parametrize(
    "reads", [{"window_tokens": 200}, {"chunk_tokens": 200}, {"holds_state": True}], ids=str
)
def test_no_slot_is_looked_up_twice_wherever_a_window_has_its_slots(kept, reads):
    _, asked = look_up(CacheGroup(0, 4, **reads), kept)
    keys = [*chain.from_iterable(asked)]
    assert len(keys) == len({*keys})
    assert len(asked) <= 5, "not one by one either"


@pytest.mark.parametrize(
    ("groups", "whole"),
    [
        ([CacheGroup(0, 4)], True),
        ([CacheGroup(0, 4, state_tokens=2)], False),
        ([CacheGroup(0, 4), CacheGroup(1, 8, is_scratch=True)], False),
    ],
)
def test_requests_whose_last_token_needs_others_are_not_served_whole(groups, whole):
    assert make_map(*groups).serves_whole_requests is whole


def test_scratch_has_no_keys_and_decides_where_hits_end():
    """vLLM has them end where all groups have whole blocks, also those that it never looks up."""
    full, ring = CacheGroup(0, 4), CacheGroup(1, 6, is_scratch=True)
    prefixes, hashes = make_map(full, ring, hash_block_tokens=4), make_hashes(6)
    assert prefixes.alignment_tokens == 12
    assert prefixes.longest_hits(hashes, among(hashes), 0, 23) == (12, 12)
    assert prefixes.needed_keys(hashes, 0, 12) == hashes[:3]
    assert prefixes.slot_keys(hashes, ring, 0, 6) == []
    assert prefixes.count_slots(0, 12) == 3
    assert prefixes.count_named(ring, range(4), 24) == 0
