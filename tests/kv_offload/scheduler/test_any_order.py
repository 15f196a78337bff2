"""Random requests, steps, copies and resets, of all kinds of groups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from vllm.v1.request import RequestStatus

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.versions import vllm_version
from tests.support.beside_steps import teach
from tests.support.played_cases import BLOCK, CHUNKS, FULL, PROMPT, STATE, WINDOW, narrow
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import Tokens

pytestmark = pytest.mark.filterwarnings("default")

NEWER = vllm_version() >= (0, 32)


SHAPES = [
    (FULL,),
    (CacheGroup(0, BLOCK, 10),),
    (FULL, WINDOW),
    (CacheGroup(0, 8), CacheGroup(1, BLOCK, 6)),
    (CacheGroup(0, BLOCK, 7), CacheGroup(1, BLOCK, 13), CacheGroup(2, BLOCK)),
    (FULL, CHUNKS),
    (CacheGroup(0, BLOCK, chunk_tokens=16),),
    (FULL, STATE),
    (CacheGroup(0, BLOCK, holds_state=True), CacheGroup(1, BLOCK), CacheGroup(2, BLOCK, 6)),
]
MAX_TOKENS = 60
LINES = [(PROMPT * 3)[:MAX_TOKENS], [0, 1, 1, 0] * 15, [1] * MAX_TOKENS]
"""Random prompts begin like one of these, so that most of them share prefixes."""

plugins = st.fixed_dictionaries(
    {
        "eviction_policy": st.sampled_from(["lru", "arc"]),
        "store_blocks": st.sampled_from(["all", "all", "prompt"]),
        "store_after_uses": st.sampled_from([1, 1, 2]),
        "max_pinned_share": st.sampled_from([0.2, 0.5, 1.0]),
    }
)


class AnyOrder(RuleBasedStateMachine):
    """Random requests, steps, copies and resets; every forward checks the KV that it reads."""

    @initialize(
        groups=st.sampled_from(SHAPES),
        spare_blocks=st.sampled_from([0, 0, 4, 20]),
        slots=st.sampled_from([6, 20, 60]),
        ranks=st.integers(1, 2),
        async_scheduling=st.booleans(),
        replaces_resumed=st.booleans(),
        synchronous_loads=st.booleans(),
        drafts=st.sampled_from([0, 0, 2]),
        max_num_batched_tokens=st.sampled_from([8, 16, 64]),
        plugin=plugins,
        fail_load=st.booleans(),
    )
    def start(
        self,
        groups: tuple[CacheGroup, ...],
        spare_blocks: int,
        plugin: dict[str, Any],
        fail_load: bool,
        **arguments: Any,
    ) -> None:
        if any(group.holds_state for group in groups):
            arguments["drafts"] = 0
        if fail_load:
            plugin["on_load_failure"] = "fail"
        self.engine = PlayedEngine(
            groups,
            # vLLM too starts only with room for the longest request.
            blocks=2 + sum(64 // group.block_tokens for group in groups) + spare_blocks,
            max_model_len=64,
            plugin=plugin,
            **arguments,
        )
        self.engine.propose = self.propose
        self.requests = 0

    def propose(self, tokens: Tokens) -> Tokens:
        """Draft well or badly, depending on the text."""
        good = self.engine.good_drafts(tokens)
        return good if len(tokens) % 3 else [1 - token for token in good]

    @precondition(lambda self: len(self.engine.scheduler.requests) < 7)
    @rule(
        line=st.sampled_from(LINES),
        shared=st.integers(1, 44),
        tail=st.lists(st.integers(0, 1), max_size=5),
        max_tokens=st.integers(1, 11),
        skips=st.sampled_from([False] * 9 + [True]),
    )
    def add(self, line: Tokens, shared: int, tail: Tokens, max_tokens: int, skips: bool) -> None:
        self.requests += 1
        self.engine.add(
            f"r{self.requests}", line[:shared] + tail, max_tokens, skip_reading_prefix_cache=skips
        )

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.scheduler.requests))))

    @precondition(lambda self: self.engine.under_way < self.engine.max_steps_under_way)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.scheduled)
    @rule()
    def execute(self) -> None:
        self.engine.execute()

    @precondition(lambda self: self.engine.executed)
    @rule()
    def process(self) -> None:
        self.engine.process()

    @rule(steps=st.integers(1, 4), copies=st.booleans())
    def step(self, steps: int, copies: bool) -> None:
        self.engine.finish_steps()
        self.engine.step(steps, copies=copies)

    @precondition(lambda self: any(rank.copies.submitted for rank in self.engine.ranks))
    @rule(data=st.data(), fail=st.sampled_from([False, False, False, True]))
    def copy(self, data: st.DataObject, fail: bool) -> None:
        busy = [rank.copies for rank in self.engine.ranks if rank.copies.submitted]
        copies = data.draw(st.sampled_from(busy))
        copies.run(data.draw(st.integers(0, len(copies.submitted) - 1)), fail=fail)

    @rule(computes=st.booleans())
    def prefer(self, computes: bool) -> None:
        """Have hits computed or loaded, as the times that were measured could."""
        teach(self.engine, 1e3 if computes else 1e12)

    @rule(slots=st.sampled_from([0, 2, 1000]))
    def narrow(self, slots: int) -> None:
        narrow(self.engine, slots)

    @rule()
    def evict_what_is_free(self) -> None:
        """Have the engine forget blocks, as other traffic would; host memory serves them then."""
        pool = self.engine.pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0})

    @rule(stuck=st.booleans(), connector=st.booleans(), running=st.booleans())
    def reset(self, stuck: bool, connector: bool, running: bool) -> None:
        engine = self.engine
        # vLLM cannot reset what waits with loaded KV, nor what a step under way will write.
        running = running and not (
            self.engine.under_way
            or (stuck and engine.offload.gauges()["running_loads"])
            or any(
                request_id in engine.offload.loading_requests()
                or (request.num_computed_tokens and request.status != RequestStatus.RUNNING)
                for request_id, request in engine.scheduler.requests.items()
                if not request.is_finished()
            )
        )
        for rank in engine.ranks:
            rank.copies.stuck = stuck
        must_succeed = running or not (engine.scheduler.requests or self.engine.under_way)
        done = engine.reset(reset_connector=connector, reset_running_requests=running)
        assert done or not must_succeed
        assert not engine.offload.has_pending_stores
        for rank in engine.ranks:
            rank.copies.stuck = False

    @invariant()
    def host_memory_is_right(self) -> None:
        self.engine.check_host_memory()
        self.engine.check_pins()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        # An idle engine does not step for stores that were given up; the next request's steps do.
        self.engine.step(2, copies=True)
        self.engine.check_rest()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    deadline=None,
    max_examples=100,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
