"""A played engine whose device lags behind its host, as under asynchronous scheduling it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_swap.engine import Direction, SwapJob

from tests.support.manual_copies import ManualSwapEngine
from tests.support.played_engine import PlayedEngine


class LaggingEngine(PlayedEngine):
    """Computes a step as late as a device may: when the next one's first hooks have run.

    Or when the engine takes its output. A load that does not come behind compute is copied the
    moment it is submitted, so before the step under way has read or written anything; with `eager`
    every other copy runs as soon as what it comes behind is computed.
    """

    def __init__(self, *arguments: Any, eager: bool = True, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._late: tuple[Any, Sequence[Any]] | None = None
        self._fence: object = None
        self._eager = eager
        self.loaded: list[SwapJob] = []
        """All loads."""
        self.ran_ahead: list[SwapJob] = []
        """Loads that were copied before a step that was launched earlier was computed."""
        for rank in self.ranks:
            self._put_on(rank.copies)

    def _put_on(self, copies: ManualSwapEngine) -> None:
        submit, wait, zero = copies.submit, copies.wait, copies.zero_blocks

        def submit_in_order(job: SwapJob) -> None:
            fenced = self._late is not None and self._late is self._fence
            if fenced or (job.before_compute and job.behind_compute):
                self.compute()  # `submit` copies what is before compute
            submit(job)
            if job.direction is Direction.LOAD:
                self.loaded.append(job)
            if not job.behind_compute:
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
    def under_way(self) -> int:
        return super().under_way + (self._late is not None)

    def execute(self) -> None:
        output = self.scheduled.popleft()
        for rank in self.ranks:
            rank.connector.begin_step(output)
        self.compute()
        self.model.follow(output)
        for rank in self.ranks:
            rank.begin(output)
        self._late = output, [rank.end(output) for rank in self.ranks]

    def compute(self) -> None:
        """Compute the step that was launched last, if that has not been done."""
        if self._late is not None:
            (output, reports), self._late = self._late, None
            self.take_results(output, self.forward(output), reports)
        if self._eager:
            self.run_copies()

    def process(self) -> None:
        if not self.executed:
            self.compute()
        super().process()
