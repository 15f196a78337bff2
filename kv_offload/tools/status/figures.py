"""What the samples of a page mean: totals, and what has changed since an earlier reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_offload.metrics import PREFIX, SKIP_REASONS
from kv_offload.tools.status.read import OF_VLLM, Reading

ERRORS = ("failed_loads", "repaired_loads", "lost_requests", "hook_errors", "skipped_copy_failed")
"""Counters that stay 0 in a healthy engine."""

WAITS = {
    "running_loads": "loads under way",
    "running_stores": "stores under way",
    "waiting_slots": "slots of ended requests that wait to be stored",
    "pinned_blocks": "GPU blocks that a store keeps from reuse",
}
"""Gauges of what waits now, and what each of them counts."""


@dataclass(frozen=True)
class Count:
    """A counter: since the start of the server, and in each second since the earlier reading."""

    total: float
    per_second: float | None
    """None where there is no earlier reading, or the server was started again since."""


class Figures:
    """What one engine does, or several together: by default all of the page.

    Names are those of the metrics, without `PREFIX`.
    """

    def __init__(
        self, now: Reading, before: Reading | None = None, engines: Sequence[str] | None = None
    ) -> None:
        self.engines = tuple(now.engines if engines is None else engines)
        self.model = now.model
        self.seconds = None if before is None else now.taken - before.taken
        """Between the readings."""
        self._now, self._before = now, before

    def gauge(self, name: str) -> float:
        """Return a gauge, summed up over the engines."""
        return self._total(self._now, name)

    def largest(self, name: str) -> float:
        """Return a gauge that does not add up: of several engines, the largest."""
        return max(self._now.values.get((PREFIX + name, engine), 0.0) for engine in self.engines)

    def counter(self, name: str, prefix: str = PREFIX) -> Count:
        """Return a counter, summed up over the engines."""
        return self._counted(lambda reading: self._total(reading, f"{name}_total", prefix))

    @property
    def tokens(self) -> dict[str, Count]:
        """Tokens of admitted requests, where each came from, and what was asked of host memory."""
        return {
            "prompt_tokens": self.counter("queries", OF_VLLM),
            "gpu_tokens": self.counter("hits", OF_VLLM),
            "host_tokens": self.counter("hit_tokens"),
            "computed_tokens": self._counted(self._computed),
            "lookup_tokens": self.counter("lookup_tokens"),
            "recomputed_tokens": self.counter("recomputed_tokens"),
        }

    def bytes_per_second(self, copies: str) -> float:
        """Return the speed while `stored` or `loaded` copies ran, waiting included, or 0."""
        busy_seconds = self.counter(f"{copies}_seconds").total
        return self.counter(f"{copies}_bytes").total / busy_seconds if busy_seconds else 0.0

    @property
    def skipped(self) -> dict[str, Count]:
        """Slots not stored, by reason."""
        return {reason: self.counter(f"skipped_{reason}") for reason in SKIP_REASONS}

    @property
    def waiting(self) -> dict[str, float]:
        """The gauges of `WAITS`."""
        return {name: self.gauge(name) for name in WAITS}

    @property
    def errors(self) -> dict[str, float]:
        """The counters of `ERRORS`."""
        return {name: self.counter(name).total for name in ERRORS}

    def load_seconds(self, share: float) -> float | None:
        """Return the time that this share of all loads took at most, as Prometheus estimates it.

        None before the first load.
        """
        counts: dict[float, float] = {}
        for engine in self.engines:
            buckets = self._now.buckets.get((f"{PREFIX}load_seconds", engine), {})
            for bound, up_to in buckets.items():
                counts[bound] = counts.get(bound, 0.0) + up_to
        bounds = sorted(counts)
        if not bounds or not counts[bounds[-1]]:
            return None
        wanted = share * counts[bounds[-1]]
        lower, below = 0.0, 0.0
        for bound in bounds[:-1]:
            if counts[bound] >= wanted:
                return lower + (bound - lower) * (wanted - below) / (counts[bound] - below)
            lower, below = bound, counts[bound]
        return lower

    def as_json(self) -> dict[str, object]:
        """Return all that does not need a second reading."""
        return {
            "engines": self.engines,
            "model": self.model,
            **{name: count.total for name, count in self.tokens.items()},
            **{
                copies: {
                    "bytes": self.counter(f"{copies}_bytes").total,
                    "bytes_per_second": self.bytes_per_second(copies),
                }
                for copies in ("stored", "loaded")
            },
            "load_times": {
                "median_seconds": self.load_seconds(0.5),
                "slowest_hundredth_seconds": self.load_seconds(0.99),
            },
            "pool": {
                **{name: self.gauge(name) for name in ("slots_in_use", "slots", "pool_slots")},
                "slot_bytes": self.largest("slot_bytes"),
                **{name: self.counter(name).total for name in ("stored_slots", "evictions")},
            },
            "skipped": {reason: count.total for reason, count in self.skipped.items()},
            "waiting": self.waiting,
            "oldest_copy_seconds": self.largest("oldest_copy_seconds"),
            "errors": self.errors,
        }

    def _total(self, reading: Reading, name: str, prefix: str = PREFIX) -> float:
        return sum(reading.values.get((prefix + name, engine), 0.0) for engine in self.engines)

    def _counted(self, value: Callable[[Reading], float]) -> Count:
        newest = value(self._now)
        if self._before is None or not self.seconds:
            return Count(newest, None)
        growth = newest - value(self._before)
        return Count(newest, growth / self.seconds if growth >= 0 else None)

    def _computed(self, reading: Reading) -> float:
        asked = self._total(reading, "queries_total", OF_VLLM)
        cached = self._total(reading, "hits_total", OF_VLLM)
        # A request that was preempted is looked up again, which vLLM's counters leave out.
        return max(0.0, asked - cached - self._total(reading, "hit_tokens_total"))
