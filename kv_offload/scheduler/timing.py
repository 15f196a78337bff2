"""How long steps and copies take, as measured, and how long the next ones are expected to take.

All estimates are medians of recent measurements: one that a hiccup spoiled changes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kv_offload.engine import StepOutput
from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS, RecentMedian

MAX_STEP_SECONDS = 1.0
"""A longer time between two steps is a pause, not a step."""

COPY_EVERY = 32
"""One in so many of the hits that are to be computed is copied, to measure that again.

If that copy was clearly faster than the others, the next hit is copied, too, and so on. Otherwise
it would take 250 hits to notice that a link which was slow for a minute has recovered."""

MIN_PREFILL_TOKENS = 64
"""A step of fewer tokens says how long a step takes at least, not how long tokens take."""

MIN_TOKENS_PER_REQUEST = 10
"""A step with fewer is one of decodes, or of drafts: most of its tokens are not of prompts."""


def tells_of_prompts(tokens: int, requests: int) -> bool:
    """Return whether the time of a step of so many tokens and requests is that of prompts."""
    return tokens >= MIN_PREFILL_TOKENS and tokens >= requests * MIN_TOKENS_PER_REQUEST


class CopyRate:
    """Bytes per second of copies that ran alone, and when to try one where computing is sooner.

    A copy ends when the slowest rank has ended its part. Ranks tell of one copy in different steps,
    and a slow one less often, since its copies overlap. One that does not tell now counts with the
    median of what it told last. Otherwise a single hiccup would count again with all that the
    others tell.

    Of the hits that are to be computed every `COPY_EVERY`th is copied all the same.
    """

    def __init__(self) -> None:
        self._recent = RecentMedian()
        self._told: dict[int, RecentMedian] = {}
        self._computed = 0

    def hear(self, told: Mapping[int, float | None]) -> None:
        """Take the speeds that ranks tell now; None where one tells none."""
        news = {rank: speed for rank, speed in told.items() if speed is not None}
        if not news:
            return
        for rank, speed in news.items():
            self._told.setdefault(rank, RecentMedian(MIN_MEASUREMENTS)).add(speed)
        silent = [known.value for rank, known in self._told.items() if rank not in news]
        self.learn(min([*news.values(), *silent]))
        if self._recent.has_risen:
            self._computed = COPY_EVERY - 1

    def learn(self, bytes_per_second: float) -> None:
        """Take the speed of the slowest rank."""
        self._recent.add(bytes_per_second)

    @property
    def measured_bytes_per_second(self) -> float | None:
        """The measured speed; None without evidence."""
        return self._recent.value if len(self._recent) >= MIN_MEASUREMENTS else None

    def seconds(self, nbytes: int) -> float:
        """Return how long a copy takes that stands behind no other."""
        return nbytes / (self._recent.value if self._recent else ASSUMED_BYTES_PER_SECOND)

    @property
    def is_to_be_tried(self) -> bool:
        """True if the next hit is copied, though it would be computed faster."""
        return self._computed + 1 >= COPY_EVERY

    def count_hit(self, *, computed: bool) -> None:
        """Take note that a hit is computed, or else copied."""
        self._computed = self._computed + 1 if computed else 0


class StepTime:
    """How long the engine has made steps: by this it is seen which copies hang.

    Ranks start and report copies in steps alone, and none follows for minutes where the user of an
    engine in his own process does something else. So of the time between two steps a second counts.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.seconds = 0.0
        self.recent_seconds = 0.0
        """Seconds of recent steps, on average."""
        self._clock = clock
        self._last: float | None = None

    def next_step(self) -> None:
        """Note that a step is planned."""
        now = self._clock()
        if self._last is not None:
            seconds = min(now - self._last, MAX_STEP_SECONDS)
            self.seconds += seconds
            self.recent_seconds += (seconds - self.recent_seconds) / 8
        self._last = now


class LoadQueue:
    """Slots of loads that were planned and that some rank has not ended.

    Loads are taken to run one after the other. The first of them has run since the last one ended,
    or, if there was none, since it was planned.
    """

    def __init__(self) -> None:
        self._slots = 0
        self._since = 0.0

    def add(self, slots: int, now: float) -> None:
        """Count a load that is planned at `now`, in seconds of a monotonic clock."""
        if not self._slots:
            self._since = now
        self._slots += slots

    def remove(self, slots: int, now: float) -> None:
        """Count the end of a load."""
        self._slots -= slots
        self._since = now

    def seconds_ahead(self, seconds_per_slot: float, now: float) -> float:
        """Return after how long a load planned at `now` begins."""
        if not self._slots:
            return 0.0
        return max(0.0, self._slots * seconds_per_slot - (now - self._since))


class PrefillRate:
    """Tokens per second of computing prompts, from the steps that did little else.

    Small steps are slower by token, so measurements are kept apart by powers of two of the step's
    tokens. Attention makes later tokens of a prompt slower than earlier ones, so the estimate is
    optimistic for prompts longer than those that were measured.
    """

    def __init__(self) -> None:
        self._recent: dict[int, RecentMedian] = {}
        self._known_sizes: list[int] = []

    def learn(self, tokens: int, requests: int, seconds: float) -> None:
        """Take the time of one step; those that tell nothing about prompts are left out."""
        if tells_of_prompts(tokens, requests):
            size = tokens.bit_length()
            if size not in self._recent:
                self._recent[size] = RecentMedian()
            self._recent[size].add(tokens / seconds)
            if len(self._recent[size]) == MIN_MEASUREMENTS:
                self._known_sizes = sorted([*self._known_sizes, size])

    @property
    def tokens_per_second(self) -> float | None:
        """The rate in the largest steps of which there is evidence; None if there is none."""
        sizes = self._known_sizes
        return self._recent[sizes[-1]].value if sizes else None

    def seconds(self, tokens: int) -> float | None:
        """Return how long computing `tokens` takes; None without evidence.

        Where only larger steps were measured it is the time of such a step: computing fewer tokens
        takes at most that.
        """
        sizes = self._known_sizes
        if not sizes:
            return None
        smaller = [size for size in sizes if size <= tokens.bit_length()]
        if smaller:
            return tokens / self._recent[smaller[-1]].value
        return float(1 << sizes[0]) / self._recent[sizes[0]].value


@dataclass(slots=True)
class Step:
    """The work of a step, as far as its time depends on it.

    `tokens` are computed, of `requests` requests. `loads` says that loads are in flight while it
    runs, `waits` that its forward comes after a load.
    """

    tokens: int
    requests: int
    loads: bool
    waits: bool
    begun: float = 0.0
    paused: float = 0.0


class StepClock:
    """Times steps from end to end where they follow each other, else from their plan to their end.

    Steps end in the order in which they begin. With asynchronous scheduling the next one is planned
    before the last has ended; then its time begins when that one ends. While nothing is under way
    no time passes, so an idle engine makes no step long.

    An engine in the process of its user leaves a step when it pauses, and looks at it only after it
    has launched the next. So of a step whose end may have been seen late no time is taken.
    """

    def __init__(self) -> None:
        self._under_way: deque[Step] = deque()
        self._ended = 0.0
        self._computed_until = 0.0
        self._has_just_ended = False

    def begin(self, step: Step, now: float) -> None:
        """Take a step whose plan is made at `now`, in seconds of a monotonic clock."""
        step.begun = now
        if self._has_just_ended:
            self._has_just_ended = False
            if self._under_way:
                # Whoever drives the engine may have done something else meanwhile.
                self._under_way[0].paused = now - self._ended
        self._under_way.append(step)

    def under_way(self, now: float) -> tuple[Sequence[Step], float]:
        """Return the steps that have not ended, and for how long the oldest of them runs."""
        steps = self._under_way
        if not steps:
            return (), 0.0
        return steps, now - max(steps[0].begun, self._computed_until)

    def end(self, now: float) -> tuple[Step, float] | None:
        """Return the oldest step under way, which ends now, with its seconds.

        None where there is none, where it computed nothing, and where it was not being waited for
        during half of that time, so that it may have ended unseen.
        """
        if not self._under_way:
            return None
        step = self._under_way.popleft()
        self._ended = now
        self._has_just_ended = True
        if not step.tokens:
            return None
        seconds = now - max(step.begun, self._computed_until)
        if seconds <= 0 or 2 * step.paused > seconds:
            return None
        self._computed_until = now
        return step, seconds


class StepWatch:
    """Times every step, and learns from it."""

    def __init__(self) -> None:
        self.load_rate = CopyRate()
        self.prefill_rate = PrefillRate()
        self.step_seconds = RecentMedian()
        self.decode_seconds = RecentMedian()
        """Times of steps in which every request computed one token, and no load was under way."""
        self._clock = StepClock()
        self._most_tokens = 0

    def begin(self, output: StepOutput, *, loads: bool, waits: bool) -> None:
        """Take a step that is all planned: what planning takes is not the fault of copies.

        See `Step` for the arguments.
        """
        requests = len(output.num_scheduled_tokens)
        step = Step(output.total_num_scheduled_tokens, requests, loads, waits)
        self._most_tokens = max(self._most_tokens, step.tokens)
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

    def forget(self) -> None:
        """Forget the steps under way, of which one has ended without a word."""
        self._clock = StepClock()

    @property
    def under_way(self) -> int:
        """Steps that were planned and have not ended."""
        return len(self._clock.under_way(time.monotonic())[0])

    def seconds_left(self) -> float:
        """Return how much longer the steps under way will compute; 0 without evidence."""
        steps, ran = self._clock.under_way(time.monotonic())
        return max(0.0, sum(map(self._expected_seconds, steps)) - ran)

    def prompt_seconds(self, tokens: int) -> float:
        """Return how long a step takes that computes prompts; 0 without evidence.

        Of so many `tokens`, or of as many as any step has computed: more may not fit in one.
        """
        tokens = min(tokens, self._most_tokens)
        return self.prefill_rate.seconds(tokens) or 0.0 if tells_of_prompts(tokens, 1) else 0.0

    def _expected_seconds(self, step: Step) -> float:
        """Return what a step takes at least: a prompt's tokens, or else a token of each request."""
        if tells_of_prompts(step.tokens, step.requests):
            return self.prefill_rate.seconds(step.tokens) or 0.0
        return self.decode_seconds.value if step.tokens and self.decode_seconds else 0.0

    def gauges(self) -> dict[str, float]:
        """Return what was measured, by the names of the metrics; 0 for what was not."""
        return {
            "load_bytes_per_second": self.load_rate.measured_bytes_per_second or 0.0,
            "prefill_tokens_per_second": self.prefill_rate.tokens_per_second or 0.0,
        }
