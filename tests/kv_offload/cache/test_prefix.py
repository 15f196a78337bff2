from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

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


def make_key(block_hash: bytes, group_id: int) -> bytes:
    return block_hash + b" of group %d" % group_id


def slot_key(block_hash: bytes, group_id: int) -> bytes:
    return make_key(block_hash, group_id) if group_id else block_hash


def among(keys: Collection[bytes]) -> Readable:
    return lambda asked: np.array([key in keys for key in asked], bool)


def everything(keys: Sequence[bytes]) -> NDArray[np.bool_]:
    return np.ones(len(keys), bool)


def make_hashes(count: int) -> list[bytes]:
    return [b"hash %d" % i for i in range(count)]


def make_map(*groups: CacheGroup, hash_block_tokens: int | None = None) -> PrefixMap:
    tokens = hash_block_tokens or math.gcd(*(group.block_tokens for group in groups))
    return PrefixMap(groups, tokens, make_key)


# -- brute force -------------------------------------------------------------------------------


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
    def readable(self) -> Readable:
        return among(self.readable_keys)

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


@settings(deadline=None, max_examples=1000)
@given(cases())
def test_the_longest_hit_is_what_brute_force_finds(case: Case) -> None:
    found = case.prefixes.longest_hit(case.hashes, case.readable, case.start, case.limit)
    assert found == case.longest_hit()


@given(cases())
def test_needed_slots_hold_exactly_the_blocks_that_are_read(case: Case) -> None:
    alignment = case.prefixes.alignment_tokens
    for end in range(alignment * (case.start // alignment + 1), case.limit + 1, alignment):
        for group in case.prefixes.groups:
            needed = case.prefixes.needed_slots(group, case.start, end)
            assert set(needed) == case.blocks_read(group, end)


@given(cases())
def test_a_hit_needs_readable_keys_only_and_all_of_them(case: Case) -> None:
    end = case.prefixes.longest_hit(case.hashes, case.readable, case.start, case.limit)
    if end == case.start:
        return
    keys = case.prefixes.needed_keys(case.hashes, case.start, end)
    assert set(keys) <= case.readable_keys
    assert len(set(keys)) == len(keys)
    assert len(keys) == case.prefixes.count_slots(case.start, end)


@given(cases(), st.integers(0, 400))
def test_a_hit_never_goes_beyond_the_limit_nor_below_the_start(case: Case, limit: int) -> None:
    end = case.prefixes.longest_hit(case.hashes, everything, case.start, limit)
    assert case.start <= end
    assert end == case.start or end <= min(limit, len(case.hashes) * case.hash_block_tokens)


@given(cases(), st.data())
def test_the_answer_shrinks_with_what_is_readable(case: Case, data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.sampled_from(sorted(case.readable_keys) or [b"none"])))
    ends = [
        case.prefixes.longest_hit(case.hashes, readable, case.start, case.limit)
        for readable in (among(kept), case.readable)
    ]
    assert ends == sorted(ends)


# -- by example --------------------------------------------------------------------------------

FULL = CacheGroup(0, 4)
HASHES = make_hashes(8)


def hit(prefixes: PrefixMap, readable: Readable, start: int, limit: int) -> int:
    return prefixes.longest_hit(HASHES, readable, start, limit)


def keys_of(group: CacheGroup, *blocks: int) -> set[bytes]:
    return {slot_key(HASHES[block], group.group_id) for block in blocks}


@pytest.mark.parametrize(
    ("reads", "ends"),
    [
        ({"window_tokens": None}, {100: 0}),
        ({"window_tokens": 1}, {100: 100}),
        ({"window_tokens": 4}, {100: 97}),
        ({"window_tokens": 100}, {100: 1}),
        ({"window_tokens": 101}, {100: 0}),
        ({"window_tokens": 200}, {100: 0}),
        # vLLM's own examples: 13 and 8 computed tokens leave 8 behind, 7 leave none.
        ({"chunk_tokens": 8}, {0: 0, 1: 0, 7: 0, 8: 8, 9: 8, 13: 8, 15: 8, 16: 16, 23: 16}),
        ({"holds_state": True}, {0: 0, 1: 0, 16: 15}),
    ],
    ids=str,
)
def test_the_first_token_that_a_query_at_an_end_reads(
    reads: dict[str, Any], ends: dict[int, int]
) -> None:
    group = CacheGroup(0, 4, **reads)
    assert {end: group.first_needed_token(end) for end in ends} == ends


WINDOW, LARGE = CacheGroup(1, 4, 5), CacheGroup(1, 8)
CHUNKS = CacheGroup(0, 4, chunk_tokens=10)
AHEAD = CacheGroup(0, 4, sees_next_token=True)
AHEAD_WINDOW = CacheGroup(0, 4, 6, sees_next_token=True)
AHEAD_CHUNKS = CacheGroup(0, 4, chunk_tokens=8, sees_next_token=True)


@pytest.mark.parametrize(
    ("groups", "known", "start", "limit", "end"),
    [
        pytest.param([FULL], [(0, 1, 3, 4)], 0, 31, 8, id="a gap ends a hit"),
        pytest.param([FULL], [(0, 1, 3, 4)], 12, 31, 20, id="a local hit bridges a gap"),
        pytest.param([FULL], [range(8)], 0, 3, 0, id="the limit is below a slot"),
        pytest.param([LARGE], [range(8)], 0, 7, 0, id="the limit is below a slot of two hashes"),
        pytest.param([CacheGroup(0, 4, 6)], [(3, 4)], 0, 31, 20, id="a window needs its own"),
        # A query at 20 reads from 15 on with a window of 6, and from 16 on with one of 5.
        pytest.param([CacheGroup(0, 4, 6)], [(4,)], 0, 31, 0, id="a window begins inside a block"),
        pytest.param([CacheGroup(0, 4, 5)], [(4,)], 0, 31, 20, id="a window begins with a block"),
        pytest.param([CHUNKS], [(3,)], 0, 19, 0, id="a chunk begins inside a block"),
        pytest.param([CHUNKS], [(2, 3)], 0, 19, 16, id="a chunk needs all of its first block"),
        # The full group covers 8 tokens, where the window misses a block: only 4 are left.
        pytest.param([FULL, WINDOW], [(0, 1), (0, 2, 3, 4)], 0, 31, 4, id="one falls short"),
        pytest.param([WINDOW, FULL], [(0, 2, 3, 4), (0, 1)], 0, 31, 4, id="the other does"),
        # The full group covers 12 tokens, but the window's slots have 8, of which it has one.
        pytest.param(
            [FULL, CacheGroup(1, 8, 5)], [(0, 1, 2), (1,)], 0, 31, 8, id="where all slots end"
        ),
        pytest.param([FULL, LARGE], [range(5), (1, 3, 5)], 0, 23, 16, id="two sizes of blocks"),
        # KV that depends on the next token: a block behind the end proves it. At 31 of 32 tokens
        # a hit of 28 ends before the last one, and block 7 names token 28.
        pytest.param([AHEAD], [range(8)], 0, 31, 28, id="a proof may end with the prompt"),
        pytest.param([AHEAD], [range(8)], 0, 27, 24, id="a proof may lie behind the limit"),
        pytest.param([AHEAD_WINDOW], [(3, 4)], 0, 31, 0, id="a window lacks its first block"),
        pytest.param([AHEAD_WINDOW], [(2, 3, 4)], 0, 31, 16, id="a window has a proof"),
        pytest.param([AHEAD_CHUNKS], [(4,)], 0, 31, 16, id="a chunk needs its proof alone"),
        pytest.param([AHEAD_CHUNKS], [(3,)], 0, 31, 0, id="a chunk has no proof"),
    ],
)
def test_a_hit_by_the_blocks_that_are_known(
    groups: list[CacheGroup], known: list[Sequence[int]], start: int, limit: int, end: int
) -> None:
    """Blocks have the numbers of their last hashes."""
    prefixes = make_map(*groups, hash_block_tokens=4)
    keys = [keys_of(group, *blocks) for group, blocks in zip(groups, known, strict=True)]
    assert hit(prefixes, among(set().union(*keys)), start, limit) == end


def test_a_chunk_that_begins_needs_no_block() -> None:
    chunks = CacheGroup(1, 4, chunk_tokens=8)
    prefixes = make_map(FULL, chunks)
    assert prefixes.needed_keys(HASHES, 0, 16) == sorted(keys_of(FULL, 0, 1, 2, 3))
    assert hit(prefixes, among(keys_of(FULL, 0, 1, 2, 3, 4)), 0, 31) == 16
    assert hit(prefixes, among(keys_of(FULL, *range(5)) | keys_of(chunks, 4)), 0, 31) == 20


def test_a_state_needs_its_last_block_only() -> None:
    states = CacheGroup(1, 4, holds_state=True)
    prefixes = make_map(FULL, states)
    readable = keys_of(FULL, 0, 1, 2, 3, 4) | keys_of(states, 1, 3)
    assert hit(prefixes, among(readable), 0, 31) == 16
    assert hit(prefixes, among(readable), 0, 15) == 8
    assert hit(prefixes, among(readable), 16, 31) == 16
    assert set(prefixes.needed_keys(HASHES, 4, 16)) == keys_of(FULL, 1, 2, 3) | keys_of(states, 3)


@pytest.mark.parametrize(("known", "end"), [(0, 0), (1, 0), (2, 4), (5, 16), (8, 28)])
def test_the_next_token_of_a_hit_is_proven_by_the_block_behind_it(known: int, end: int) -> None:
    """Of blocks with KV that depends on the next token, the last that matches is dropped."""
    assert hit(make_map(AHEAD), among(keys_of(AHEAD, *range(known))), 0, 32) == end


@pytest.mark.parametrize(("known", "end"), [((3,), 12), ((3, 4), 16), ((4, 5), 12), ((3, 5), 12)])
def test_the_block_that_a_local_hit_dropped_is_loaded_if_the_next_one_proves_it(
    known: tuple[int, ...], end: int
) -> None:
    """The engine knows blocks 0 to 3 and has dropped the last, so the load starts at 12."""
    prefixes = make_map(AHEAD)
    assert hit(prefixes, among(keys_of(AHEAD, *known)), 12, 32) == end
    assert set(prefixes.needed_keys(HASHES, 12, 16)) == keys_of(AHEAD, 3)


def test_a_proof_is_a_slot_of_the_group_that_needs_it() -> None:
    """Of a block of eight tokens, four behind the end prove nothing yet."""
    prefixes = make_map(CacheGroup(0, 8, sees_next_token=True), hash_block_tokens=4)
    assert hit(prefixes, everything, 0, 31) == 24
    assert prefixes.longest_hit(HASHES[:7], everything, 0, 31) == 16


@pytest.mark.parametrize("hashes", [1, 2, 4])
def test_a_slot_is_named_by_the_last_hash_of_its_block(hashes: int) -> None:
    group = CacheGroup(0, 4 * hashes)
    prefixes = make_map(group, hash_block_tokens=4)
    last_hashes = HASHES[hashes - 1 :: hashes]
    slots = len(last_hashes)
    assert prefixes.pool_keys(HASHES, group, 0, slots) == [make_key(h, 0) for h in last_hashes]
    for first in range(slots):
        assert prefixes.slot_keys(HASHES, group, first, slots) == last_hashes[first:]


def test_keys_of_all_groups_but_the_first_name_the_group() -> None:
    window = CacheGroup(1, 4, 6)
    prefixes = make_map(FULL, window)
    assert prefixes.slot_keys(HASHES, FULL, 0, 2) == HASHES[:2]
    assert prefixes.slot_keys(HASHES, window, 0, 2) == [make_key(h, 1) for h in HASHES[:2]]


def test_keys_that_do_not_begin_with_the_hash_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="makes the keys of its blocks in an unknown way"):
        PrefixMap([FULL], 4, lambda block_hash, group_id: b"%d " % group_id + block_hash)


@pytest.mark.parametrize("missing", [0, 7, 8, 39, 40, 41, 99])
def test_few_slots_are_looked_up_behind_the_first_that_is_missing(missing: int) -> None:
    hashes = make_hashes(400)
    asked: list[bytes] = []

    def readable(keys: Sequence[bytes]) -> NDArray[np.bool_]:
        asked.extend(keys)
        return np.array([key != hashes[missing] for key in keys], bool)

    assert make_map(FULL).longest_hit(hashes, readable, 0, 1600) == 4 * missing
    assert asked == hashes[: len(asked)]
    assert len(asked) <= FIRST_LOOKUP_SLOTS + (LOOKUP_GROWTH + 1) * missing


@pytest.mark.parametrize(
    "kept", [range(0), range(7, 12), range(60, 100), range(0, 400, 2)], ids=str
)
@pytest.mark.parametrize(
    "reads", [{"window_tokens": 200}, {"chunk_tokens": 200}, {"holds_state": True}], ids=str
)
def test_no_slot_is_looked_up_twice_wherever_a_window_has_its_slots(
    kept: range, reads: dict[str, Any]
) -> None:
    """It is done for a waiting request, on the engine's scheduling thread."""
    hashes = make_hashes(400)
    asked: list[Sequence[bytes]] = []

    def readable(keys: Sequence[bytes]) -> NDArray[np.bool_]:
        asked.append(keys)
        return np.array([hashes.index(key) in kept for key in keys], bool)

    make_map(CacheGroup(0, 4, **reads)).longest_hit(hashes, readable, 0, 1600)
    keys = list(chain.from_iterable(asked))
    assert len(keys) == len({*keys})
    assert len(asked) <= 5, "not one by one either"


def test_a_block_without_a_hash_has_no_key() -> None:
    group = CacheGroup(0, 8)
    prefixes = make_map(group, hash_block_tokens=2)
    for keys in (prefixes.pool_keys, prefixes.slot_keys):
        assert len(keys(HASHES, group, 0, 2)) == 2
        assert len(keys(HASHES[:7], group, 0, 2)) == 1
        assert keys(HASHES[:7], group, 1, 2) == []
    assert len(prefixes.needed_keys(HASHES[:7], 0, 16)) == 1
    assert prefixes.needed_keys(HASHES[:3], 0, 16) == []


def test_blocks_have_names_up_to_a_boundary_of_all_groups() -> None:
    prefixes = make_map(CacheGroup(0, 4), CacheGroup(1, 6))
    assert [prefixes.align(end) for end in (0, 11, 12, 23, 24)] == [0, 0, 12, 12, 24]
    assert [make_map(FULL).align(end) for end in (3, 4, 7)] == [0, 4, 4]
    assert make_map(FULL, CacheGroup(1, 8)).alignment_tokens == 8


def test_needed_keys_are_in_prefix_order_group_by_group() -> None:
    window = CacheGroup(1, 4, 6)
    expected: Sequence[bytes] = [
        *HASHES[1:5],
        *(make_key(HASHES[block], 1) for block in (3, 4)),
    ]
    assert make_map(FULL, window).needed_keys(HASHES, 4, 20) == expected
