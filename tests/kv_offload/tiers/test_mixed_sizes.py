"""Reads of a prefix that the GPU has in part, also where blocks have different sizes.

A hit ends where every group has a whole block, at a multiple of `LARGE` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_swap.tiers.engine import TierDirection

from kv_offload.cache.prefix import CacheGroup
from tests.kv_offload.tiers.test_tiers import DiskEngine, ask
from tests.support.played_cases import OTHER, PROMPT

pytestmark = pytest.mark.engine

SMALL, LARGE = 4, 8
LONG = PROMPT + OTHER[:12]
HIT_TOKENS = 32
"""Tokens of `LONG` that a hit can have; at least one is computed."""

KINDS = {
    "one group": (CacheGroup(0, SMALL),),
    "two sizes": (CacheGroup(0, SMALL), CacheGroup(1, LARGE)),
    "large blocks first": (CacheGroup(0, LARGE), CacheGroup(1, SMALL)),
    "a window of small blocks": (CacheGroup(0, LARGE), CacheGroup(1, SMALL, 6)),
    "a window of large blocks": (CacheGroup(0, SMALL), CacheGroup(1, LARGE, 12)),
    "states": (
        CacheGroup(0, LARGE),
        CacheGroup(1, LARGE, holds_state=True),
        CacheGroup(2, SMALL, 6),
    ),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def engine(request: pytest.FixtureRequest, memory_folder: Path) -> Iterator[DiskEngine]:
    """An engine whose disk has `LONG` and hangs; neither host memory nor the GPU has any of it."""
    made = DiskEngine(memory_folder, prompts=False, groups=request.param, blocks=120)
    made.serve("first", LONG, 1)
    made.forget()
    made.totals.clear()
    made.disk.stuck = True
    yield made
    made.disk.stuck = False
    made.run()
    made.rest()
    made.connector.shutdown()


def compute(engine: DiskEngine, num_tokens: int) -> None:
    """Have the GPU compute the beginning of `LONG`, whatever the tier has."""
    params = {"kv_offload": {"load": False}}
    engine.add("beginning", LONG[:num_tokens], 1, extra_args={"kv_transfer_params": params})
    engine.step(10, copies=True)
    assert "beginning" in engine.answers


@pytest.mark.parametrize("on_gpu", [8, 24, HIT_TOKENS])
def test_what_the_gpu_has_by_the_end_of_a_read_is_not_loaded(engine, on_gpu):
    """If it has all that is read, the request does not wait for the read, which hangs."""
    ask(engine, "a", prompt=LONG)
    being_read = engine.running(TierDirection.PROMOTE)
    assert being_read
    compute(engine, on_gpu + 1)
    assert ("a" in engine.answers) == (on_gpu == HIT_TOKENS)
    engine.disk.stuck = False
    engine.run()
    assert engine.totals["hit_tokens"] == HIT_TOKENS - on_gpu
    assert engine.totals["promoted_slots"] == len(being_read)


@pytest.mark.parametrize("on_gpu", [8, 24])
def test_a_request_waits_for_what_is_read_of_a_prefix_that_another_has_in_part(engine, on_gpu):
    """The first had the beginning on the GPU, and the second loads it from host memory."""
    compute(engine, on_gpu + 1)
    ask(engine, "a", prompt=LONG)
    being_read = engine.running(TierDirection.PROMOTE)
    assert being_read
    assert engine.scheduler.reset_prefix_cache()
    engine.add("b", LONG, 2)
    engine.step(8, copies=True)
    assert engine.running(TierDirection.PROMOTE) == being_read
    assert not engine.answers.keys() & {"a", "b"}
    engine.disk.stuck = False
    engine.run()
    assert engine.totals["hit_tokens"] == HIT_TOKENS
    assert engine.totals["promoted_slots"] == len(being_read)
