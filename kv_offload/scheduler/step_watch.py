"""What is learnt from the time of the engine's steps, and of loads."""

from __future__ import annotations

import time

from kv_offload.engine import StepOutput
from kv_offload.medians import RecentMedian
from kv_offload.scheduler.rates import LoadRate, PrefillRate
from kv_offload.scheduler.step_clock import Step, StepClock


class StepWatch:
    """Times every step, and learns from it."""

    def __init__(self) -> None:
        self.load_rate = LoadRate()
        self.prefill_rate = PrefillRate()
        self.step_seconds = RecentMedian()
        self.decode_seconds = RecentMedian()
        """Of steps in which every request computed one token, and no load was under way."""
        self._clock = StepClock()

    def begin(self, output: StepOutput, *, loads: bool, waits: bool) -> None:
        """Take a step that is all planned: what planning takes is not the fault of copies.

        See `Step` for the arguments.
        """
        requests = len(output.num_scheduled_tokens)
        step = Step(output.total_num_scheduled_tokens, requests, loads, waits)
        self._clock.begin(step, time.monotonic())

    def end(self) -> None:
        """Learn from the oldest step under way, which has ended. Called once a step."""
        timed = self._clock.end(time.monotonic())
        if timed is None:
            return
        step, seconds = timed
        self.step_seconds.add(seconds)
        if step.tokens == step.requests and not (step.loads or step.waits):
            self.decode_seconds.add(seconds)
        if not step.waits:
            self.prefill_rate.learn(step.tokens, step.requests, seconds)

    def gauges(self) -> dict[str, float]:
        """Return what was measured, by the names of the metrics; 0 for what was not."""
        return {
            "load_bytes_per_second": self.load_rate.measured_bytes_per_second or 0.0,
            "prefill_tokens_per_second": self.prefill_rate.tokens_per_second or 0.0,
        }
