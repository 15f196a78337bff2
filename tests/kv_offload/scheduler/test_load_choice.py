"""Load or recompute, on a clock and with rates that the test sets."""

from __future__ import annotations

import random
import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from kv_offload.cache.prefix import CacheGroup
from kv_offload.config import OffloadConfig
from kv_offload.measurement import MIN_MEASUREMENTS
from kv_offload.scheduler.core import EngineFacts, SlotFacts
from kv_offload.scheduler.loads.costs import LoadCosts
from kv_offload.scheduler.loads.decision import MARGIN, MAX_COMPUTE_RATIO
from kv_offload.scheduler.request import Phase, TrackedRequest
from kv_offload.scheduler.scheduler import OffloadScheduler
from kv_offload.scheduler.timing import COPY_EVERY, LoadQueue, StepWatch

pytestmark = pytest.mark.usefixtures("now")

BLOCK = 16
SLOT_BYTES = BLOCK * 131_072
"""A block of 16 tokens of a model like Llama-3.1-8B."""


class Named(SimpleNamespace):
    """Unlike its base it can be referenced weakly."""


class Chosen:
    """A choice between a link and a device of given speeds, both measured."""

    def __init__(
        self,
        bytes_per_second: float,
        tokens_per_second: float = 38_000,
        mode: Any = "measured",
        longest: int = 8192,
        loads: int = 15,
        steps: int = MIN_MEASUREMENTS,
    ) -> None:
        self.watch = StepWatch()
        self.queue = LoadQueue()
        self.costs = LoadCosts(mode, SLOT_BYTES, self.watch, self.queue)
        self.alive: list[Any] = []
        self.link(bytes_per_second, loads)
        for tokens in (1024, 8192):
            for _ in range(steps):
                self.watch.prefill_rate.learn(tokens, 1, tokens / tokens_per_second)
        self.request("longest", longest, computed=longest)

    def link(self, bytes_per_second: float, loads: int = 15) -> None:
        for _ in range(loads):
            self.watch.load_rate.add_reports({0: bytes_per_second})

    def request(self, request_id: str, tokens: int, computed: int = 0) -> Any:
        request = Named(request_id=request_id, num_tokens=tokens, num_computed_tokens=computed)
        tracked = TrackedRequest(request)
        self.costs.admitted(tracked, 0)
        self.alive.append(tracked)
        return tracked

    def loads(self, tokens: int = 4096, start: int = 0, synchronous: bool = True) -> bool:
        end = start + tokens
        costs = self.costs.of(start, end, end, tokens // BLOCK, idle=False)
        return not self.costs.computes(costs, synchronous=synchronous)


EVEN = SLOT_BYTES / BLOCK * 38_000
"""The link on which loading takes as long as computing: 5 GB/s."""


def test_a_fast_link_always_loads():
    """Whatever waits before it, and however small the hit: computing takes the device."""
    chosen = Chosen(51e9)
    chosen.watch.step_seconds.add(0.2)
    for slots in (0, 100, 100_000):
        chosen.queue.add(slots, 1000.0)
        for tokens in (BLOCK, 128, 1024, 4096, 16384):
            for synchronous in (True, False):
                assert chosen.loads(tokens, synchronous=synchronous)


def test_a_load_takes_the_time_of_its_blocks_however_small_their_slots_are():
    """Ranks tell of the bytes of blocks per second also where slots are packed."""
    pool: Any = BlockPool(2, enable_caching=True, hash_block_size=BLOCK)
    engine = EngineFacts((CacheGroup(0, BLOCK),), pool, lambda key, _: key)
    config = OffloadConfig(cpu_bytes=1 << 20)
    offload = OffloadScheduler(config, engine, SlotFacts(4, SLOT_BYTES // 2, SLOT_BYTES))
    offload.watch.load_rate.add_reports({0: 10.0 * SLOT_BYTES})
    assert offload._costs.load_seconds(20) == pytest.approx(2.0)


def test_a_slow_link_computes():
    chosen = Chosen(EVEN / 2)
    assert not chosen.loads()
    assert not chosen.loads(start=4096)
    assert chosen.loads(tokens=64), "so few take a step, as far as is known"


@pytest.mark.parametrize("known", ["loads", "steps"])
def test_without_evidence_it_loads(known):
    assert Chosen(EVEN / 10, **{known: MIN_MEASUREMENTS - 1}).loads()
    assert not Chosen(EVEN / 10, **{known: MIN_MEASUREMENTS}).loads()


def test_a_prompt_that_is_much_longer_than_any_computed_one_is_loaded():
    assert Chosen(EVEN / 10, longest=2000).loads()
    assert not Chosen(EVEN / 10, longest=2048).loads()


def test_a_decision_near_the_border_stays():
    """Measurements that scatter by 5 % move it once at most."""
    draw = random.Random(1)
    for centre in (EVEN / MARGIN, EVEN / 1.1, EVEN * 0.999):
        chosen = Chosen(EVEN)
        decisions = []
        for _ in range(400):
            chosen.link(centre * draw.uniform(0.95, 1.05), loads=1)
            decisions.append(chosen.loads())
        changes = sum(a != b for a, b in pairwise(decisions))
        assert changes <= 1


def test_the_queue_of_loads_counts_where_the_link_is_not_much_faster(now):
    chosen = Chosen(EVEN * 1.5)
    assert chosen.loads()
    chosen.queue.add(4096 // BLOCK, 1000.0)
    assert not chosen.loads()
    now[0] += 4096 / 38_000
    assert chosen.loads(), "the one before it should have ended by now"
    chosen = Chosen(EVEN * MAX_COMPUTE_RATIO * 1.01)
    chosen.queue.add(100_000, 1000.0)
    assert chosen.loads()


def test_prompts_that_are_being_computed_come_first():
    chosen = Chosen(EVEN / 2)
    running = chosen.request("running", 2500)
    chosen.costs.admitted(running, 0)
    assert not chosen.loads()
    another = chosen.request("another", 2500)
    assert chosen.loads()
    running.request.num_computed_tokens = 2499  # the rest is a decode
    chosen.costs.next_step()
    assert not chosen.loads()
    running.request.num_computed_tokens = 0
    another.phase = Phase.ENDED
    chosen.costs.next_step()
    assert not chosen.loads()


def test_a_step_counts_the_prompts_that_come_first_once():
    """A hundred hits of one step must not look at a hundred prompts each."""
    chosen = Chosen(EVEN / 2)
    first = chosen.request("first", 2500)
    assert not chosen.loads()
    first.request = None  # an error for whoever looks
    chosen.request("second", 2500)
    assert chosen.loads(), "what the step itself admits counts"
    first.request = Named(request_id="first", num_tokens=2500, num_computed_tokens=2499)
    assert chosen.loads()
    chosen.costs.next_step()
    assert not chosen.loads(), "the next step counts again"


@pytest.mark.parametrize("mode", ["measured", "always_load"])
def test_requests_that_have_ended_are_let_go(mode):
    chosen = Chosen(EVEN, mode=mode)
    ended = []
    for index in range(9):
        tracked = chosen.request(f"{index}", 8192)
        ended.append(weakref.ref(tracked.request))
        tracked.phase = Phase.ENDED
        del tracked
    chosen.alive.clear()
    assert [request() is None for request in ended] == [True] * 9


@pytest.mark.parametrize("recovers", [True, False])
def test_a_link_that_was_slow_for_a_while_is_soon_used_again(recovers):
    """Not after eight times as many hits as it takes to measure it once."""
    chosen = Chosen(51e9)
    chosen.link(EVEN / 10, loads=8)
    assert not chosen.loads()
    decisions = []
    for _ in range(COPY_EVERY + 30):
        decisions.append(chosen.loads())
        if decisions[-1]:
            chosen.costs.rate.count_hit(computed=False)
            chosen.link(51e9 if recovers else EVEN / 10, loads=1)
        else:
            chosen.costs.rate.count_hit(computed=True)
    assert decisions.count(False) == (COPY_EVERY - 1 if recovers else COPY_EVERY + 29)


def test_a_single_fast_load_of_a_slow_link_has_one_more_loaded():
    chosen = Chosen(EVEN / 10)
    chosen.link(51e9, loads=1)
    assert chosen.loads()
    chosen.costs.rate.count_hit(computed=False)  # and was too small to be measured
    assert not chosen.loads()
