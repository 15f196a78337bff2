"""Random interleavings of everything that happens to an engine, with faults at every point.

vLLM's scheduler, its engine core's pauses, resets and sleep, and both sides of the plugin are real;
the model, the copies and the ranks are played (`PlayedEngine`). After every action, each readable
slot holds what its key stands for, pins and blocks add up, and forwards have read right KV. At the
end everything comes to rest, and all answers are right. Only where a test has made recovery
impossible may a request end with an error, and even then without a wrong token.

`INTERLEAVINGS_SECONDS` is the time for all variants; Hypothesis prints how to reproduce a failure.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kv_offload.cache.prefix import CacheGroup
from tests.support.beside_steps import teach
from tests.support.hooks import HOOKS, wrap_hook
from tests.support.loads import set_synchronous_loads
from tests.support.manual_tier import REMOTE, ManualTier, manual_remote
from tests.support.played_cases import CHUNKS, FULL, RING, STATE, WINDOW, narrow
from tests.support.played_engine import PlayedEngine
from tests.support.timing import Lagging

pytestmark = pytest.mark.engine

SECONDS = float(os.environ.get("INTERLEAVINGS_SECONDS", "60"))
STEPS = 70
PHASES = (Phase.generate, Phase.shrink)[: 1 + ("INTERLEAVINGS_SHRINK" in os.environ)]

TOKENS = FULL.block_tokens
GROUPS = (
    (FULL,),
    (FULL,),
    (FULL, WINDOW),
    (FULL, STATE),
    (FULL, WINDOW, CacheGroup(2, TOKENS, 12)),
    (CacheGroup(0, TOKENS, 10),),
    (CacheGroup(0, 2 * TOKENS), CacheGroup(1, TOKENS, 6)),
    (FULL, CHUNKS),
    (CacheGroup(0, TOKENS, chunk_tokens=16),),
    (FULL, RING),
    (CacheGroup(0, TOKENS, holds_state=True), CacheGroup(1, TOKENS), CacheGroup(2, TOKENS, 6)),
)

HITS_INSIDE = [(FULL, STATE)]
"""Variants whose hits may end inside blocks."""

TEXTS = [
    [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1],
    [0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1],
]
"""Prompts are prefixes of these, so many share a prefix."""

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
IMPATIENCE = {
    "promoter.MAX_WAIT_SECONDS": 0.003,
    "promoter.MIN_WAIT_SECONDS": 0.003,
    "base.STUCK_SECONDS": 0.005,
    "base.FIRST_PAUSE_SECONDS": 0.002,
    "base.LONGEST_PAUSE_SECONDS": 0.004,
    "directory.PATIENCE_SECONDS": 0.003,
    "disk.SET_ASIDE_SHARE": 3,
}
"""Steps take microseconds here, and a disk that hangs must do so for longer than the engine waits.
Some slots of the small disk can be set aside."""

TIER_FAULTS = ("submit", "error", "mismatch")
COPIES = ("submit", "before_compute", "load_now", "copy")
HAPPENED: Counter[str] = Counter()
"""How often each fault and each action has happened, over all examples of a run."""
NEEDED = ("answered", "blocks loaded", "failed load", "told routers", "unpackable", "sessions")
"""Events without which a variant proves nothing; a slow machine runs until they have happened."""
MOST_EXTRA_SEEDS = 40

HINTS: tuple[dict[str, Any], ...] = (
    {"store": False},
    {"load": False},
    {"max_load_tokens": 8},
    {"retain_seconds": 0.001},
    {"retain_seconds": 600},
)
UPSETS = ("pause", "pause", "reset", "reset", "sleep", "weights", "trainer", "drain")
UPSET = st.tuples(st.sampled_from(UPSETS), st.booleans(), st.booleans())


@dataclass(frozen=True)
class Case:
    """The stage of copies, and an event at that stage.

    At `stage` 0 they are planned, at 1 they run, at 2 they have ended on one rank or on all, at 3
    their report is in flight, at 4 the engine has processed it. At random, hardly any event happens
    at the stages after 1.
    """

    stage: int
    rank: int
    fails: bool
    all_ranks: bool
    others: bool
    """Whether another request runs, so that some resets do not succeed."""
    events: list[tuple[str, Any]]


CASES = st.builds(
    Case,
    stage=st.integers(0, 4),
    rank=st.integers(0, 2),
    fails=st.booleans(),
    all_ranks=st.booleans(),
    others=st.booleans(),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("upset"), UPSET),
            st.tuples(st.just("stuck"), UPSET),
            st.tuples(st.just("hook"), st.sampled_from(HOOKS)),
            st.tuples(st.sampled_from(("abort", "again")), st.integers(1, 3)),
            st.tuples(st.just("step"), st.integers(1, 2)),
        ),
        max_size=3,
    ),
)


ENGINES = st.fixed_dictionaries(
    {
        "groups": st.sampled_from(GROUPS),
        "synchronous_loads": st.booleans(),
        "beside": st.booleans(),
        "replaces_resumed": st.booleans(),
        "slots": st.sampled_from((64, 64, 8, 3)),
        "scheduling_policy": st.sampled_from(("fcfs", "priority")),
        "drafts": st.sampled_from((0, 0, 2)),
        "checkpoints": st.sampled_from((0, 1)),
        "match_tokens": st.sampled_from((None, 2)),
        "tier": st.sampled_from((None, None, 1024, 136, "remote", "both")),
        "events": st.booleans(),
        "plugin": st.fixed_dictionaries(
            {
                "eviction_policy": st.sampled_from(("auto", "lru")),
                "store_blocks": st.sampled_from(("all", "all", "prompt")),
                "max_pinned_share": st.sampled_from((0.2, 0.8, 1.0)),
                "max_share_per_salt": st.sampled_from((0.2, 1.0, 1.0)),
                "on_load_failure": st.sampled_from(("recompute", "recompute", "fail")),
            }
        ),
    }
)


class StallingClock:
    """Replaces `time.monotonic`, in seconds: it advances when read, and sometimes by a lot.

    So a machine's stall at a bad moment is repeated with the example.
    """

    TICK_SECONDS = 20e-6
    STALLS = (0.001, 0.004, 0.02, 1.0, 10.0)

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._share = chance.choice((0.0, 0.002, 0.02, 0.2))
        self._now = 1000.0

    def __call__(self) -> float:
        self._now += self.TICK_SECONDS
        if self._chance.random() < self._share:
            self._now += self._chance.choice(self.STALLS)
        return self._now


class InjectedError(RuntimeError):
    """Raised by a hook that a test has armed."""


class Interleavings(RuleBasedStateMachine):
    """One engine, and everything that users, copies and bad luck do to it."""

    async_scheduling: ClassVar[bool]
    ranks: int

    def __init__(self) -> None:
        super().__init__()
        self.cleanup = contextlib.ExitStack()

    @initialize(
        arguments=ENGINES,
        stages=st.sampled_from((1, 1, 2, 3)),
        blocks=st.sampled_from((14, 20, 40)),
        locked=st.sampled_from((True, True, True, False)),
        lags=st.booleans(),
        waits=st.booleans(),
        together=st.booleans(),
        stalls=st.integers(0, 1 << 16),
    )
    def start(
        self,
        arguments: dict[str, Any],
        stages: int,
        blocks: int,
        locked: bool,
        lags: bool,
        waits: bool,
        together: bool,
        stalls: int,
    ) -> None:
        self.ranks = max(self.ranks, stages)
        piped = stages > 1
        late = lags and (self.async_scheduling or piped)
        self.cleanup.enter_context(
            mock.patch("time.monotonic", StallingClock(random.Random(stalls)))
        )
        for name, few in (("MANY_RUNNING", 2), ("WAITING_SHARE", 1)) if together else ():
            self.cleanup.enter_context(
                mock.patch(f"kv_offload.scheduler.stores.planner.{name}", few)
            )
        if below := arguments.pop("tier"):
            if isinstance(below, str):
                arguments["plugin"] |= REMOTE
                self.cleanup.enter_context(manual_remote())
            if below != "remote":
                folder = self.cleanup.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
                nbytes = f"{(136 if below == 'both' else below) * self.ranks << 10}B"
                disk = {"path": folder, "bytes": nbytes, "keep_on_restart": False}
                arguments["plugin"]["disk"] = disk
            for name, seconds in (IMPATIENCE if not waits else {}).items():
                self.cleanup.enter_context(mock.patch(f"kv_offload.tiers.{name}", seconds))
        if late or (piped and not self.async_scheduling):
            # Where steps overlap, vLLM's `Scheduler` plans drafts in the place of the token that
            # they follow (vLLM 52071).
            arguments["drafts"] = 0
        arguments["replaces_resumed"] |= piped and self.async_scheduling  # runner V2 alone has both
        if not any(group.holds_state for group in arguments["groups"]):
            arguments["checkpoints"] = 0
        if arguments["groups"] not in HITS_INSIDE:
            del arguments["match_tokens"]
        self.engine = PlayedEngine(
            **arguments,
            timing=Lagging(eager=False) if late else None,
            ranks=self.ranks,
            stages=stages,
            async_scheduling=self.async_scheduling,
            blocks=blocks * len(arguments["groups"]),
            max_num_batched_tokens=12,
            locked_slots=arguments["slots"] if locked else 1,
        )
        self.requests: dict[str, Any] = {}
        self.sessions: dict[str, Any] = {}
        self.aborted: set[str] = set()
        self.armed: Counter[str] = Counter()
        self.injected = 0
        self.may_end = arguments["plugin"]["on_load_failure"] == "fail"
        self.engine.propose = self.propose
        for text in TEXTS:
            self.add(text, len(text), [], 1)
            self.engine.run()
        for hook in HOOKS:
            for connector in (self.engine.connector, *(r.connector for r in self.engine.ranks)):
                wrap_hook(connector, hook, functools.partial(self._armed, hook))

    def propose(self, tokens: list[int]) -> list[int]:
        """Draft well or badly, depending on the text."""
        good = self.engine.good_drafts(tokens)
        return good if len(tokens) % 3 else [1 - token for token in good]

    def _armed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.armed[name]:
                self.armed[name] -= 1
                self.injected += 1
                HAPPENED[name] += 1
                raise InjectedError(name)
            return hook(*args, **kwargs)

        return call

    # -- what users do -------------------------------------------------------------------------

    @rule(
        text=st.sampled_from(TEXTS),
        tokens=st.integers(3, 20),
        tail=st.lists(st.integers(0, 1), max_size=4),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 2),
        skip_reading_prefix_cache=st.sampled_from((False,) * 9 + (True,)),
        hints=st.sampled_from(({},) * 9 + HINTS),
    )
    def add(
        self,
        text: list[int],
        tokens: int,
        tail: list[int],
        max_tokens: int,
        hints: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        if hints:
            arguments["extra_args"] = {"kv_transfer_params": {"kv_offload": hints}}
        request_id = f"r{len(self.requests)}"
        self.requests[request_id] = self.engine.add(
            request_id, [*text[:tokens], *tail], max_tokens, **arguments
        )

    @property
    def live_sessions(self) -> list[str]:
        return [name for name, session in self.sessions.items() if not session.is_finished()]

    @rule(
        text=st.sampled_from(TEXTS),
        parts=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=2, max_size=4),
    )
    def stream(self, text: list[int], parts: list[tuple[int, int]]) -> None:
        """Begin a session. Two could keep each other's blocks for ever."""
        if not self.live_sessions:
            name = f"s{len(self.sessions)}"
            sampled = ((text[:tokens], max_tokens) for tokens, max_tokens in parts)
            self.sessions[name] = self.engine.stream(name, *sampled)

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        live = [r for r, request in self.requests.items() if not request.is_finished()]
        live += self.live_sessions
        if live:
            request_id = live[which % len(live)]
            self.engine.abort(request_id)
            self.aborted.add(request_id)

    @rule(tokens=st.lists(st.integers(8, 20), min_size=1, max_size=3), text=st.sampled_from(TEXTS))
    def ask_again(self, tokens: list[int], text: list[int]) -> None:
        """Drop the GPU's cache, and request prefixes that host memory may have."""
        self.forget()
        for count in tokens:
            self.add(text, count, [], 3)
        self.engine.schedule()

    @rule(text=st.sampled_from(TEXTS), tokens=st.lists(st.integers(8, 20), min_size=1, max_size=3))
    def ask_tier(self, text: list[int], tokens: list[int]) -> None:
        """Drop host memory too, and request prefixes that the tier may have."""
        self.engine.offload.manager.reset()
        self.ask_again(tokens, text)

    @rule(text=st.sampled_from(TEXTS), synchronous=st.booleans())
    def serve(self, text: list[int], synchronous: bool) -> None:
        """Serve a text until host memory has it, then request it with another kind of load."""
        self.add(text, len(text), [], 1)
        self.run(8)
        set_synchronous_loads(self.engine.offload, synchronous)
        self.ask_again([len(text), len(text) - 5], text)

    @rule(text=st.sampled_from(TEXTS), case=CASES)
    def meet_load(self, text: list[int], case: Case) -> None:
        """Upset asynchronous loads. One of the requests may wait for the other's load."""
        self._plan_load(text, case, synchronous=False)
        self._meet(case)

    @rule(text=st.sampled_from(TEXTS), case=CASES)
    def meet_synchronous_load(self, text: list[int], case: Case) -> None:
        """Upset loads that a forward waits for; if they fail they are lost."""
        self._plan_load(text, case, synchronous=True)
        if case.fails:
            for site in ("before_compute", "load_now"):
                self.break_copies(case.rank, site, 1)
        self._meet(case)

    @rule(text=st.sampled_from(TEXTS), case=CASES)
    def meet_store(self, text: list[int], case: Case) -> None:
        """Upset stores, also of a request that has ended."""
        self._plan(case)
        self.add([len(self.requests) % 2, *text], 21, [], 1 + len(self.requests) % 3)
        self.engine.step()
        self.engine.schedule()
        self._meet(case)

    def _plan_load(self, text: list[int], case: Case, *, synchronous: bool) -> None:
        slots = self.engine.offload.manager.usable_slots
        text = text[: max(8, 4 * slots)]
        self.add(text, len(text), [], 1)
        self.run(8)
        self._plan(case)
        set_synchronous_loads(self.engine.offload, synchronous)
        self.add(text, len(text), [], 3)
        self.add(text, max(6, len(text) - 5), [], 3)
        self.engine.schedule()

    def _plan(self, case: Case) -> None:
        """Drop from the engine's own cache what host memory may have; another request may run."""
        engine = self.engine
        self.armed.clear()
        for rank in engine.ranks:
            rank.copies.stuck = False
            rank.copies.faults.clear()
        engine.core.resume_scheduler()
        engine.finish_steps()
        engine.abort(*self.live_sessions)
        engine.core.reset_prefix_cache(True, False)
        if case.others:
            self.add([0] * 8, 8, [], 6)
            engine.step()

    def _meet(self, case: Case) -> None:
        """Bring the copies of a planned step to a stage, and upset them there."""
        engine, copies = self.engine, self.engine.ranks[case.rank % self.ranks].copies
        if case.stage >= 1:
            copies.faults["copy"] = int(case.fails and case.stage >= 2)  # in case it runs at once
            engine.execute()
        if case.stage >= 2:
            for job in list(copies.submitted):
                HAPPENED[f"failed {job.direction.value}"] += case.fails
                copies.run(copies.submitted.index(job), fail=case.fails)
            if case.all_ranks:
                engine.run_copies()
        if case.stage >= 3:
            engine.process()
            engine.schedule()
            engine.execute()
        if case.stage >= 4:
            engine.process()
        for name, argument in case.events:
            self._event(name, argument, case.rank)

    def _event(self, name: str, argument: Any, rank: int) -> None:
        if name == "upset":
            self.upset(*argument)
        elif name == "hook":
            self.break_hook(argument)
            self._go_on()
        elif name == "stuck":
            self.hang(rank, True)
            self.upset(*argument)
        elif name == "abort":
            self.abort(-argument)
        elif name == "again":
            self.abort(-1)
            self.add_again(argument)
        else:
            self.step(argument)

    def _go_on(self) -> None:
        engine = self.engine
        if engine.executed or engine.under_way > len(engine.scheduled):
            engine.process()
        elif engine.scheduled:
            engine.execute()
        else:
            engine.schedule()

    def forget(self) -> None:
        engine = self.engine
        engine.core.resume_scheduler()
        engine.finish_steps()
        if not engine.scheduler.running and not self._cannot_reset():
            engine.core.reset_prefix_cache(False, False)

    @rule(which=st.integers(0, 99))
    def add_again(self, which: int) -> None:
        """Reuse the name of a request that has ended, as a client may."""
        engine = self.engine
        engine.finish_steps()
        names = [name for name in self.requests if name not in engine.scheduler.requests]
        if names:
            name = names[-1 - which % len(names)]
            self.requests[name] = engine.add(name, TEXTS[which % 2], 2)
            self.aborted.discard(name)

    @rule(
        how=st.sampled_from(UPSETS), keep=st.booleans(), clear=st.sampled_from((False, False, True))
    )
    def upset(self, how: str, keep: bool, clear: bool) -> None:
        """Pause, reset, sleep or change weights, as users and trainers do."""
        cannot_reset = self._cannot_reset()
        if cannot_reset and how in ("weights", "trainer"):
            return  # the engine's own cache would continue to serve the old ones'
        try:
            self._upset(how, keep, clear)
        except RuntimeError as error:
            # vLLM raises, because copies that do not end keep their blocks.
            if not cannot_reset or isinstance(error, InjectedError):
                raise
            how = f"failed {how}"
        HAPPENED[how] += 1

    def _upset(self, how: str, keep: bool, clear: bool) -> None:
        core, scheduler = self.engine.core, self.engine.scheduler
        if how == "drain":
            scheduler.set_pause_state(PauseState.PAUSED_NEW)
        elif how == "pause":
            self._abort_all(not keep)
            core.pause_scheduler("keep" if keep else "abort", clear)
        elif how == "reset":
            cannot_reset = self._cannot_reset()
            done = core.reset_prefix_cache(keep, clear)
            # Only running requests may keep a reset from succeeding.
            assert done or (scheduler.running and not keep) or cannot_reset
        elif how == "sleep":
            self._abort_all(not keep)
            core.sleep(1 + clear, "keep" if keep else "abort")
            core.wake_up()
        else:
            core.pause_scheduler("keep", clear_cache=False)
            if how == "weights":
                core.collective_rpc("update_named_param")
            else:  # a trainer that calls the model itself
                core.model_executor.collective_rpc("update_weights")
                for rank in self.engine.ranks:
                    rank.weights.load_weights([])
            core.reset_prefix_cache(True, clear)
            core.resume_scheduler()

    @rule()
    def resume(self) -> None:
        self.engine.core.resume_scheduler()

    def _abort_all(self, aborts: bool) -> None:
        if aborts:
            self.aborted |= {r for r, request in self.requests.items() if not request.is_finished()}

    def _cannot_reset(self) -> bool:
        """Expect vLLM to raise, because copies that do not end, and sessions, keep their blocks."""
        broken = self.armed["offload_worker.submit_stores"] or self.armed["offload_worker.poll"]
        return bool(broken or self.live_sessions) or any(
            rank.copies.stuck for rank in self.engine.ranks
        )

    # -- what the engine does ------------------------------------------------------------------

    @precondition(lambda self: self.engine.under_way < self.engine.max_steps_under_way)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: bool(self.engine.scheduled))
    @rule()
    def execute(self) -> None:
        self.engine.execute()

    @precondition(lambda self: self.engine.under_way > len(self.engine.scheduled))
    @rule()
    def process(self) -> None:
        self.engine.process()

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        self.engine.step(steps) if self.engine.under_way == 0 else self.engine.finish_steps()

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        self.engine.core.resume_scheduler()
        self.engine.run_ahead(steps)

    # -- what copies and memory do -------------------------------------------------------------

    @rule(rank=st.integers(0, 2), which=st.integers(0, 99), fail=st.booleans())
    def copy(self, rank: int, which: int, fail: bool) -> None:
        copies = self.engine.ranks[rank % self.ranks].copies
        if copies.submitted:
            which %= len(copies.submitted)
            HAPPENED[f"failed {copies.submitted[which].direction.value}"] += fail
            copies.run(which, fail=fail)

    @rule(rank=st.integers(0, 2), blocks=st.sets(st.integers(1, 40), max_size=4))
    def refuse_stores(self, rank: int, blocks: set[int]) -> None:
        self.engine.ranks[rank % self.ranks].copies.unpackable = blocks

    @rule(fail=st.sampled_from((False, False, True)))
    def copy_all(self, fail: bool) -> None:
        for rank in self.engine.ranks:
            for job in rank.copies.submitted if fail else ():
                HAPPENED[f"failed {job.direction.value}"] += 1
        self.engine.run_copies(fail=fail)

    def tiers_of(self, rank: int, which: int) -> list[ManualTier]:
        tiers = self.engine.ranks[rank % self.ranks].tiers
        return [tiers[which % len(tiers)]] if tiers else []

    @rule(
        rank=st.integers(0, 2),
        which=st.integers(0, 1),
        site=st.sampled_from(TIER_FAULTS),
        times=st.integers(1, 3),
    )
    def break_tier(self, rank: int, which: int, site: str, times: int) -> None:
        for tier in self.tiers_of(rank, which):
            tier.faults[site] = times

    @rule(rank=st.integers(0, 2), which=st.integers(0, 1), stuck=st.booleans())
    def hang_tier(self, rank: int, which: int, stuck: bool) -> None:
        for tier in self.tiers_of(rank, which):
            tier.stuck = stuck

    @rule(stuck=st.booleans(), fails=st.booleans())
    def upset_directory(self, stuck: bool, fails: bool) -> None:
        """Make a store not answer what it has, or be gone."""
        for tier in self.engine.offload.tiers.tiers.values():
            directory = getattr(tier, "_directory", None)
            if directory is None:
                continue
            directory.stuck, directory.fails = stuck, fails
            directory.answer()

    @rule(which=st.integers(0, 99))
    def evict_from_store(self, which: int) -> None:
        for rank in self.engine.ranks:
            for tier in rank.tiers:
                if tier.is_remote and tier.records:
                    del tier.records[sorted(tier.records)[which % len(tier.records)]]

    @rule(rank=st.integers(0, 2), which=st.integers(0, 99))
    def move(self, rank: int, which: int) -> None:
        for tier in self.tiers_of(rank, which):
            if tier.submitted:
                tier.run(which // 2 % len(tier.submitted))

    @rule(rank=st.integers(0, 2), stuck=st.booleans())
    def hang(self, rank: int, stuck: bool) -> None:
        """Make copies of a rank not end while a drain waits for them, or end again."""
        self.engine.ranks[rank % self.ranks].copies.stuck = stuck

    @rule(slots=st.integers(1, 64))
    def lock(self, slots: int) -> None:
        for rank in self.engine.ranks:
            copies = rank.copies
            copies.locked_slots = min(copies.num_slots, max(copies.locked_slots, slots))

    @rule(slots=st.sampled_from((0, 2, 1000)))
    def narrow(self, slots: int) -> None:
        """Limit the slots of stores in flight."""
        armed, self.armed = self.armed, Counter()
        narrow(self.engine, slots)
        self.armed = armed

    @rule(computes=st.booleans())
    def prefer(self, computes: bool) -> None:
        """Make hits be computed or loaded, as measured times could."""
        teach(self.engine, 1e3 if computes else 1e12)

    @rule(rank=st.integers(0, 2), site=st.sampled_from(COPIES), times=st.integers(1, 2))
    def break_copies(self, rank: int, site: str, times: int) -> None:
        self.engine.ranks[rank % self.ranks].copies.faults[site] = times
        if site == "load_now":
            self.may_end = self.engine.model.may_lose_kv = True

    @rule(hook=st.sampled_from(HOOKS))
    def break_hook(self, hook: str) -> None:
        self.armed[hook] = 1
        if hook == "offload_scheduler.allocated":
            self.may_end = self.engine.model.may_lose_kv = True

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        engine = self.engine
        engine.check_host_memory()
        engine.check_pins()
        assert engine.totals["hook_errors"] <= self.injected, "a hook raised by itself"
        blocks = [block for block in engine.pool.blocks if not block.is_null]
        assert engine.pool.get_num_free_blocks() == sum(not block.ref_cnt for block in blocks)
        for request_id in engine.answers.keys() & self.requests.keys():
            answer = engine.answers[request_id]
            begin = len(self.requests[request_id].prompt_token_ids)
            for position, token in enumerate(answer, begin):
                assert token in engine.model.sampled[request_id, position], request_id

    def wake_tiers(self) -> None:
        """Run until nothing is left to write, by ending all pauses of tiers."""
        tiers = self.engine.offload.tiers.tiers.values()
        pauses = [pause for tier in tiers for pause in (tier._reads, tier._writes)]
        for _ in range(20):
            for pause in pauses:
                pause._until = 0.0
            self.engine.run()
            if not any(pause._until for pause in pauses):
                return

    def teardown(self) -> None:
        with self.cleanup:  # also after a failure, because other tests run in this process
            if hasattr(self, "engine"):
                self.come_to_rest()

    def come_to_rest(self) -> None:
        engine = self.engine
        for rank in engine.ranks:
            rank.copies.stuck = False
            HAPPENED.update(rank.copies.happened)
            rank.copies.faults.clear()
            for tier in rank.tiers:
                tier.stuck = False
                HAPPENED.update(tier.happened)
                tier.faults.clear()
        self.upset_directory(False, False)
        self.armed.clear()
        self.narrow(1000)  # otherwise waiting blocks are stored slot by slot
        engine.core.resume_scheduler()
        engine.finish_steps()
        engine.abort(*self.live_sessions)
        engine.step(2, copies=True)  # for the ends of stores that a drain has given up
        engine.run()
        self.wake_tiers()
        self.holds()
        for request_id, request in self.requests.items():
            assert request.is_finished()
            if request_id in self.aborted:
                continue
            if request.status == RequestStatus.FINISHED_ERROR:
                assert self.may_end, f"{request_id} ended though its load could be made good"
                assert engine.ended[request_id] == "error"
                HAPPENED["ended"] += 1
                continue
            HAPPENED["answered"] += 1
            assert len(engine.answers[request_id]) == request.max_tokens
        HAPPENED["sessions"] += sum(
            session.status == RequestStatus.FINISHED_LENGTH_CAPPED
            for session in self.sessions.values()
        )
        HAPPENED["blocks loaded"] += int(engine.totals["hit_tokens"]) // 4
        HAPPENED["late lookups"] += int(engine.totals["late_lookups"])
        HAPPENED["told routers"] += sum(router.heard for router in engine.routers)
        HAPPENED["late promotions"] += int(engine.totals["late_promotions"])
        engine.check_rest()
        engine.connector.shutdown()


def _variants() -> list[type[Interleavings]]:
    return [
        type(
            f"{'Async' if asynchronous else 'Plain'}{ranks}",
            (Interleavings,),
            {"async_scheduling": asynchronous, "ranks": ranks},
        )
        for asynchronous in (True, False)
        for ranks in (1, 2)
    ]


@pytest.fixture
def silent() -> Iterator[None]:
    """Keep logging quiet: pytest would keep every record, with its traceback."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("variant", _variants(), ids=lambda variant: variant.__name__)
@pytest.mark.usefixtures("silent")
def test_nothing_is_wrong_whatever_happens(variant):
    until = time.monotonic() + SECONDS / len(_variants())
    begun = HAPPENED.copy()
    first = number = int(os.environ.get("INTERLEAVINGS_SEED", "0"))
    while time.monotonic() < until or (
        number - first < MOST_EXTRA_SEEDS and min((HAPPENED - begun)[name] for name in NEEDED) == 0
    ):
        number += 1
        run_state_machine_as_test(
            seed(number)(variant),
            settings=settings(
                max_examples=10,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                print_blob=True,
                phases=PHASES,
                report_multiple_bugs=False,
                verbosity=Verbosity.normal,
                suppress_health_check=list(HealthCheck),
            ),
        )
    happened = HAPPENED - begun
    print(variant.__name__, number, dict(happened))
    assert [name for name in NEEDED if not happened[name]] == []
