"""What was measured of copying and of computing, and the time that both are expected to take.

All estimates are medians of recent measurements: one that a hiccup spoiled changes nothing.
"""

from __future__ import annotations

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS, RecentMedian

MIN_PREFILL_TOKENS = 64
"""A step of fewer tokens says how long a step takes at least, not how long tokens take."""

MIN_TOKENS_PER_REQUEST = 10
"""A step with fewer is one of decodes, or of drafts: most of its tokens are not of prompts."""


def tells_of_prompts(tokens: int, requests: int) -> bool:
    """Whether the time of a step of so many tokens, of so many requests, is that of prompts."""
    return tokens >= MIN_PREFILL_TOKENS and tokens >= requests * MIN_TOKENS_PER_REQUEST


class LoadRate:
    """Bytes per second of one rank's loads, from those that ran alone, of the slowest rank."""

    def __init__(self) -> None:
        self._recent = RecentMedian()

    def learn(self, bytes_per_second: float) -> None:
        """Take the speed of a load that ran alone on its rank."""
        self._recent.add(bytes_per_second)

    @property
    def measured_bytes_per_second(self) -> float | None:
        """The measured speed; None without evidence."""
        return self._recent.value if len(self._recent) >= MIN_MEASUREMENTS else None

    def seconds(self, nbytes: int) -> float:
        """Return how long a load takes that stands behind no other."""
        return nbytes / (self._recent.value if self._recent else ASSUMED_BYTES_PER_SECOND)


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
