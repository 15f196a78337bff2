"""Which blocks may be pinned while the engine is short of them, as values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.scheduler.stores.choice import MAX_CHECKS, StoreChoice

FULL, WINDOW, STATES = (
    CacheGroup(0, 16),
    CacheGroup(1, 16, window_tokens=128),
    CacheGroup(1, 16, holds_state=True),
)
NULL = 0


class Bed:
    """A pool whose blocks each have one owner, and requests with the last block to be stored."""

    def __init__(self, *groups):
        self.prefixes = PrefixMap(groups, 16, lambda key, group: key + group.to_bytes(4, "big"))
        blocks = [SimpleNamespace(ref_cnt=1, block_hash=None) for _ in range(40_000)]
        self.pool = SimpleNamespace(blocks=blocks, null_block=SimpleNamespace(block_id=NULL))
        self.choice = StoreChoice(self.prefixes, self.pool, set())
        self.spans, self.keys = [], []
        self.next_block = 1

    def add(self, *tables, new=1):
        """Add a request with these block tables, or with so many blocks of each group.

        The last `new` blocks of the first group are to be stored.
        """
        ids = []
        for table in tables:
            if isinstance(table, int):
                table = [*range(self.next_block, self.next_block + table)]
                self.next_block = table[-1] + 1
            ids.append(table)
        for block in ids[0][-new:]:
            key = b"%032d" % len(self.keys)
            self.pool.blocks[block].block_hash = key + self.prefixes.pool_key_suffix[0]
            self.keys.append(key)
        self.spans.append((SimpleNamespace(block_ids=ids), 0, len(ids[0]) - new, len(ids[0])))

    def choose(self, lacking, slots_left=1000):
        slots = [-1] * len(self.keys)
        chosen = self.choice.choose(self.spans, self.keys, slots, slots_left, lacking)
        return len(chosen.new), len(chosen.cut)


@pytest.mark.parametrize(("lacking", "stored"), [(0, 50), (50, 50), (60, 40), (99, 1), (100, 0)])
def test_a_request_leaves_as_many_blocks_unpinned_as_others_lack(lacking, stored):
    bed = Bed(FULL)
    bed.add(100, new=50)
    assert bed.choose(lacking) == (stored, int(stored < 50))


@pytest.mark.parametrize(("lacking", "stored"), [(58, 1), (59, 0)])
def test_blocks_that_a_window_has_left_are_not_its_own(lacking, stored):
    """It has 50 blocks of the one group, and of the other the last nine."""
    bed = Bed(FULL, WINDOW)
    bed.add(50, 50)
    assert bed.choose(lacking) == (stored, 1 - stored)


@pytest.mark.parametrize("group", [WINDOW, STATES])
def test_the_null_block_is_nobodys(group):
    bed = Bed(FULL, group)
    bed.add(50, [NULL] * 50)
    assert bed.choose(50) == (0, 1)


def test_requests_that_have_too_few_blocks_keep_no_other_from_being_stored():
    bed = Bed(FULL)
    for _ in range(MAX_CHECKS // 100 + 10):
        bed.add(100)
    for _ in range(10):
        bed.add(2000)
    assert bed.choose(120) == (10, MAX_CHECKS // 100 + 10)


def test_a_step_looks_at_a_bounded_number_of_blocks():
    bed = Bed(FULL, CacheGroup(1, 16))
    for _ in range(30):
        bed.add(300, 300)
    assert bed.choose(200) == (MAX_CHECKS // (2 * 201), 30 - MAX_CHECKS // (2 * 201))


@pytest.mark.parametrize("lacking", [0, 50])
def test_the_budget_is_that_of_all_requests_together(lacking):
    bed = Bed(FULL)
    for _ in range(5):
        bed.add(100)
    assert bed.choose(lacking, slots_left=2) == (2, 3)
