"""When the device of a played engine computes and copies: at once, or at the worst time allowed.

    engine = PlayedEngine(groups, timing=Lagging(eager=False), async_scheduling=True)

A timing serves one engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kv_swap.engine import Direction, SwapJob

if TYPE_CHECKING:
    from tests.support.manual_copies import ManualSwapEngine
    from tests.support.played_engine import PlayedEngine

POISON = -0x5A5A5A5A


class Timing:
    """Computes a step when its hooks have run; copies run when the test says so."""

    engine: PlayedEngine
    late = 0
    """The number of steps launched and not yet computed."""

    def attach(self, engine: PlayedEngine) -> None:
        """Take over the device of a built engine."""
        self.engine = engine

    def launch(self, output: Any) -> None:
        """Run the hooks of a step, and have it computed."""
        engine = self.engine
        engine.model.follow(output)
        for rank in engine.ranks:
            rank.begin(output)
        sampled = engine.forward(output)
        engine.take_results(output, sampled, [rank.end(output) for rank in engine.ranks])

    def compute(self) -> None:
        """Compute the launched steps."""


class Lagging(Timing):
    """Computes a step as late as a device may.

    That is after the next one's first hooks, or when the engine takes its output. A load that does
    not wait for compute is copied as soon as it is submitted, before the step in flight has read or
    written anything; with `eager` every other copy runs as soon as the compute before it is done.
    """

    def __init__(self, *, eager: bool = True) -> None:
        self._late: tuple[Any, Sequence[Any]] | None = None
        self._fence: object = None
        self._eager = eager
        self.loaded: list[SwapJob] = []
        """All loads submitted."""
        self.ran_ahead: list[SwapJob] = []
        """Loads copied before a step that was launched earlier was computed."""

    def attach(self, engine: PlayedEngine) -> None:
        super().attach(engine)
        for rank in engine.ranks:
            self._put_on(rank.copies)

    def _put_on(self, copies: ManualSwapEngine) -> None:
        submit, wait, zero = copies.submit, copies.wait, copies.zero_blocks

        def submit_in_order(job: SwapJob) -> None:
            fenced = self._late is not None and self._late is self._fence
            if fenced or (job.before_compute and job.after_compute):
                self.compute()  # `submit` copies jobs that compute waits for
            submit(job)
            if job.direction is Direction.LOAD:
                self.loaded.append(job)
            if not job.after_compute:
                if not job.before_compute:
                    copies.run(-1)
                if self._late is not None:
                    self.ran_ahead.append(job)

        def wait_for_compute_first(timeout_seconds: float) -> bool:
            self.compute()
            return wait(timeout_seconds)

        def fence() -> None:
            self._fence = self._late

        def zero_behind_compute(blocks: Sequence[int]) -> None:
            self.compute()
            zero(blocks)

        copies.fence_loads = fence  # type: ignore[method-assign]
        copies.zero_blocks = zero_behind_compute  # type: ignore[method-assign]
        copies.submit = submit_in_order  # type: ignore[method-assign]
        copies.wait = wait_for_compute_first  # type: ignore[method-assign]

    @property
    def late(self) -> int:  # type: ignore[override]
        return int(self._late is not None)

    def launch(self, output: Any) -> None:
        for rank in self.engine.ranks:
            rank.connector.begin_step(output)
        self.compute()
        self.engine.model.follow(output)
        for rank in self.engine.ranks:
            rank.begin(output)
        self._late = output, [rank.end(output) for rank in self.engine.ranks]

    def compute(self) -> None:
        if self._late is not None:
            (output, reports), self._late = self._late, None
            self.engine.take_results(output, self.engine.forward(output), reports)
        if self._eager:
            self.engine.run_copies()


class Harsh(Timing):
    """Computes a step after its hooks, poisons fresh blocks, and with `eager` copies at once."""

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self.poisoned_blocks = 0

    def attach(self, engine: PlayedEngine) -> None:
        super().attach(engine)
        for rank in engine.ranks:
            rank.copies.eager = self._eager

    def launch(self, output: Any) -> None:
        engine = self.engine
        engine.model.follow(output)
        for rank in engine.ranks:
            metadata = output.kv_connector_metadata
            # Runner V2 zeroes fresh blocks before all hooks, runner V1 between the first two.
            if engine.replaces_resumed:
                self._poison(output, rank)
            rank.connector.handle_preemptions(metadata)
            if not engine.replaces_resumed:
                self._poison(output, rank)
            rank.copy_blocks(output)
            rank.connector.bind_connector_metadata(metadata)
        reports = [rank.end(output) for rank in engine.ranks]
        engine.take_results(output, engine.forward(output), reports)

    def _poison(self, output: Any, rank: Any) -> None:
        """Poison the blocks that requests got in this step and that have no content yet."""
        given = [
            (self._held_tokens(new.req_id, new.num_computed_tokens), new.block_ids)
            for new in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        groups = self.engine.groups
        for index, request_id in enumerate(cached.req_ids):
            resumed = request_id in cached.resumed_req_ids
            computed = 0
            if resumed:
                computed = self._held_tokens(request_id, cached.num_computed_tokens[index])
            given.append((computed, cached.new_block_ids[index] or [[] for _ in groups]))
        for computed, by_group in given:
            for group, table in zip(groups, by_group, strict=True):
                first = -(-computed // group.block_tokens)
                fresh = [block for block in table[first:] if block != 0]
                rank.memory[fresh] = POISON
                self.poisoned_blocks += len(fresh)

    def _held_tokens(self, request_id: str, computed: int) -> int:
        """Return up to which token a request's blocks have content, replayed windows included."""
        scheduler = self.engine.scheduler
        start = scheduler.requests[request_id].replay_start
        return max(computed, start + scheduler.prefix_replay_tokens if start else 0)
