"""Measures how long steps and copies take, and estimates how long the next ones will take.

All estimates are medians of recent measurements, so a single outlier does not change them.
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
"""One in this many hits that would be computed is copied, to measure copies again.

After a copy that was clearly faster the next hit is copied, too. Otherwise it would take 250 hits
to notice that a link which was slow for a minute has recovered."""

MIN_PREFILL_TOKENS = 64
"""A step with fewer tokens measures the fixed cost of a step, not that of its tokens."""

MIN_TOKENS_PER_REQUEST = 10
"""A step with fewer tokens per request computes mostly decodes or drafts, not prompts."""


def measures_prompts(tokens: int, requests: int) -> bool:
    """Return whether a step with these numbers spends most of its time on prompts."""
    return tokens >= MIN_PREFILL_TOKENS and tokens >= requests * MIN_TOKENS_PER_REQUEST


class CopyRate:
    """The measured speed of copies that ran alone, and when to copy although computing is faster.

    A copy ends when the slowest rank has ended its part. A rank that reports none now, as a slow
    one often does, counts with the median of its last reports. Otherwise a single hiccup would
    count again with each report of the others.
    """

    def __init__(self) -> None:
        self._recent = RecentMedian()
        self._reported: dict[int, RecentMedian] = {}
        self._computed = 0

    def add_reports(self, news: Mapping[int, float]) -> None:
        """Add the speeds of the ranks that report one now; at least one does."""
        for rank, speed in news.items():
            self._reported.setdefault(rank, RecentMedian(MIN_MEASUREMENTS)).add(speed)
        silent = [known.value for rank, known in self._reported.items() if rank not in news]
        self.learn(min([*news.values(), *silent]))
        if self._recent.has_risen:
            self._computed = COPY_EVERY - 1

    def learn(self, bytes_per_second: float) -> None:
        """Add the speed of the slowest rank."""
        self._recent.add(bytes_per_second)

    @property
    def measured_bytes_per_second(self) -> float | None:
        """The measured speed; None without evidence."""
        return self._recent.value if len(self._recent) >= MIN_MEASUREMENTS else None

    def seconds(self, nbytes: int) -> float:
        """Return how long a copy takes if it does not wait for another."""
        return nbytes / (self._recent.value if self._recent else ASSUMED_BYTES_PER_SECOND)

    @property
    def is_to_be_tried(self) -> bool:
        """True if the next hit is copied although computing it would be faster."""
        return self._computed + 1 >= COPY_EVERY

    def count_hit(self, *, computed: bool) -> None:
        """Count a hit that is computed, or else copied."""
        self._computed = self._computed + 1 if computed else 0


class StepTime:
    """A clock that runs only while the engine steps. It shows which copies hang.

    Ranks start and report copies only in steps, and the user of an in-process engine may not step
    for minutes. So at most `MAX_STEP_SECONDS` of the time between two steps count.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.seconds = 0.0
        self.recent_seconds = 0.0
        """Average seconds of recent steps."""
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

    Loads are assumed to run one after another. The first has run since the previous one ended, or
    since it was planned if there was none.
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
        """Return how long a load that is planned at `now` waits for earlier loads."""
        if not self._slots:
            return 0.0
        return max(0.0, self._slots * seconds_per_slot - (now - self._since))


class PrefillRate:
    """The measured speed of computing prompts, from steps that did little else.

    Small steps take longer per token, so measurements are grouped by powers of two of the step's
    tokens. Attention makes later tokens of a prompt slower than earlier ones, so the estimate is
    optimistic for prompts longer than those that were measured.
    """

    def __init__(self) -> None:
        self._recent: dict[int, RecentMedian] = {}
        self._known_sizes: list[int] = []

    def learn(self, tokens: int, requests: int, seconds: float) -> None:
        """Add the time of a step, unless it says nothing about prompts."""
        if measures_prompts(tokens, requests):
            size = tokens.bit_length()
            if size not in self._recent:
                self._recent[size] = RecentMedian()
            self._recent[size].add(tokens / seconds)
            if len(self._recent[size]) == MIN_MEASUREMENTS:
                self._known_sizes = sorted([*self._known_sizes, size])

    @property
    def tokens_per_second(self) -> float | None:
        """The rate in the largest steps that were measured; None without evidence."""
        sizes = self._known_sizes
        return self._recent[sizes[-1]].value if sizes else None

    def seconds(self, tokens: int) -> float | None:
        """Return how long computing `tokens` takes, or an upper bound; None without evidence."""
        sizes = self._known_sizes
        if not sizes:
            return None
        smaller = [size for size in sizes if size <= tokens.bit_length()]
        if smaller:
            return tokens / self._recent[smaller[-1]].value
        return float(1 << sizes[0]) / self._recent[sizes[0]].value


@dataclass(slots=True)
class Step:
    """The work that determines the time of a step: `tokens` computed for `requests` requests.

    `loads`: loads run at the same time. `waits`: its forward waits for a load.
    """

    tokens: int
    requests: int
    loads: bool
    waits: bool
    begun: float = 0.0
    paused: float = 0.0


class StepClock:
    """Times steps from end to end while they follow each other, else from their plan to their end.

    Steps end in the order in which they begin. With asynchronous scheduling a step is planned
    before the previous one has ended; then its time begins when the previous one ends. An
    in-process engine that pauses may see the end of a step late; that step is not timed.
    """

    def __init__(self) -> None:
        self._under_way: deque[Step] = deque()
        self._ended = 0.0
        self._computed_until = 0.0
        self._has_just_ended = False

    def begin(self, step: Step, now: float) -> None:
        """Begin a step that is planned at `now`, in seconds of a monotonic clock."""
        step.begun = now
        if self._has_just_ended:
            self._has_just_ended = False
            if self._under_way:
                # The user of the engine may have done something else meanwhile.
                self._under_way[0].paused = now - self._ended
        self._under_way.append(step)

    def under_way(self, now: float) -> tuple[Sequence[Step], float]:
        """Return the steps that have not ended, and for how long the oldest of them has run."""
        steps = self._under_way
        if not steps:
            return (), 0.0
        return steps, now - max(steps[0].begun, self._computed_until)

    def end(self, now: float) -> tuple[Step, float] | None:
        """Return the oldest step under way, which ends now, with its seconds.

        None if it computed nothing, or if the engine paused for half of that time or more.
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
    """Times every step, and measures rates from these times."""

    def __init__(self) -> None:
        self.load_rate, self.store_rate = CopyRate(), CopyRate()
        self.copy_rates = {"load": self.load_rate, "store": self.store_rate}
        """By their names in reports. Lower tiers add those of their reads."""
        self.prefill_rate = PrefillRate()
        self.step_seconds = RecentMedian()
        self.decode_seconds = RecentMedian()
        """Times of steps in which every request computed one token, and no load was under way."""
        self._clock = StepClock()
        self._most_tokens = 0

    def begin(self, output: StepOutput, *, loads: bool, waits: bool) -> None:
        """Begin a step whose plan is complete; see `Step` for the arguments."""
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
        """Drop the steps under way, because one of them has ended without a report."""
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
        """Return how long a step takes to compute `tokens` of prompts; 0 without evidence.

        Tokens above the most that any step has computed do not count: they may not fit in one.
        """
        tokens = min(tokens, self._most_tokens)
        return self.prefill_rate.seconds(tokens) or 0.0 if measures_prompts(tokens, 1) else 0.0

    def _expected_seconds(self, step: Step) -> float:
        """Return the minimum time of a step: of its prompts' tokens, or of a token per request."""
        if measures_prompts(step.tokens, step.requests):
            return self.prefill_rate.seconds(step.tokens) or 0.0
        return self.decode_seconds.value if step.tokens and self.decode_seconds else 0.0

    def gauges(self) -> dict[str, float]:
        """Return the measured rates by the names of their metrics; 0 without evidence."""
        return {
            "load_bytes_per_second": self.load_rate.measured_bytes_per_second or 0.0,
            "prefill_tokens_per_second": self.prefill_rate.tokens_per_second or 0.0,
        }
