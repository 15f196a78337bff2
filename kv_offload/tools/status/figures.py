"""Computes figures from the samples on a metrics page: totals, and changes between readings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kv_offload.metrics import OTHER_SIZES, PREFIX, SKIP_REASONS
from kv_offload.tools.status.read import OF_VLLM, Reading

ERRORS = (
    *("failed_loads", "repaired_loads", "lost_requests", "hook_errors", "skipped_copy_failed"),
    "tier_errors",
)
"""Counters that stay 0 in a healthy engine."""

WAITS = {
    "running_loads": "loads",
    "running_stores": "stores",
    "waiting_slots": "slots to store",
    "pinned_blocks": "pinned GPU blocks",
}
"""Gauges of waiting work, with a description of each."""

LARGEST = ("slot_bytes", "oldest_copy_seconds", "oldest_move_seconds")
"""Gauges of which the largest value over all engines counts, not the sum."""

TIERS = {"tier_slots": "disk_usable", "has_remote": "remote_usable"}
"""Maps the gauge that shows whether a tier exists to the one that is 0 while it is not read."""


class Figures:
    """The figures of one engine, or of several together; by default of all engines on the page."""

    def __init__(
        self, now: Reading, before: Reading | None = None, engines: Sequence[str] | None = None
    ) -> None:
        self.engines = tuple(now.engines if engines is None else engines)
        self.model = now.model
        self.seconds = None if before is None else now.taken - before.taken
        """Seconds between the two readings; None with only one."""
        self.values = self._add_up(now)
        """Values by metric name without `PREFIX` and `_total`, and computed figures."""
        self._before = None if before is None else self._add_up(before)
        self._buckets = now.buckets

    def _add_up(self, reading: Reading) -> Mapping[str, float]:
        values: defaultdict[str, float] = defaultdict(float)
        by_engine = [reading.values.get(engine, {}) for engine in self.engines]
        for samples in by_engine:
            for sample, value in samples.items():
                name = sample.removeprefix(PREFIX).removesuffix("_total")
                so_far = values[name]
                values[name] = max(so_far, value) if name in LARGEST else so_far + value
        prompts, cached = values[f"{OF_VLLM}queries"], values[f"{OF_VLLM}hits"]
        loaded = values["hit_tokens"]
        values |= {"prompt_tokens": prompts, "gpu_tokens": cached, "host_tokens": loaded}
        # A preempted request is looked up again, which vLLM's counters ignore.
        values["computed_tokens"] = max(0.0, prompts - cached - loaded)
        values["load_failures"] = sum(values[name] for name in ERRORS[:3])
        values["errors"] = sum(values[name] for name in ERRORS)
        values["tiers_left_alone"] = sum(
            any(
                samples.get(PREFIX + there) and not samples.get(PREFIX + usable)
                for there, usable in TIERS.items()
            )
            for samples in by_engine
        )
        return values

    def per_second(self, name: str) -> float | None:
        """Return a counter's growth per second since the earlier reading.

        None without an earlier reading, or if the server has restarted since.
        """
        if self._before is None or not self.seconds:
            return None
        growth = self.values[name] - self._before[name]
        return growth / self.seconds if growth >= 0 else None

    def copy_rate(self, copies: str) -> float:
        """Return the bytes per second of `stored`, `loaded`, `demoted` or `promoted` copies, or 0.

        The time of a copy includes waiting, except for copies of the lower tier.
        """
        busy_seconds = self.values[f"{copies}_seconds"]
        return self.values[f"{copies}_bytes"] / busy_seconds if busy_seconds else 0.0

    def load_seconds(self, share: float) -> float | None:
        """Return a quantile of the load time in seconds, estimated as Prometheus does.

        None before the first load.
        """
        counts: defaultdict[float, float] = defaultdict(float)
        for engine in self.engines:
            for bound, up_to in self._buckets.get((f"{PREFIX}load_seconds", engine), {}).items():
                counts[bound] += up_to
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

    def some(self, *names: str) -> dict[str, float]:
        """Return the named values."""
        return {name: self.values[name] for name in names}

    @property
    def hit_ratio(self) -> float:
        """Loaded tokens as a share of looked-up tokens; 0 before the first lookup."""
        looked_up = self.values["lookup_tokens"]
        return self.values["host_tokens"] / looked_up if looked_up else 0.0

    @property
    def skipped(self) -> dict[str, float]:
        """Slots not stored, by reason."""
        return {reason: self.values[f"skipped_{reason}"] for reason in SKIP_REASONS}

    @property
    def at_other_sizes(self) -> dict[str, float]:
        """Tokens that host memory had, or would have had at other sizes; 0 if not estimated."""
        return {size: self.values[f"hit_tokens_at_{size}"] for size in OTHER_SIZES}

    def _copied(self, copies: str) -> dict[str, float]:
        """Return bytes and speed of one kind of copies."""
        return {
            "bytes": self.values[f"{copies}_bytes"],
            "bytes_per_second": self.copy_rate(copies),
        }

    def as_json(self) -> dict[str, object]:
        """Return all figures that need only one reading."""
        return {
            "engines": self.engines,
            "model": self.model,
            **self.some("prompt_tokens", "gpu_tokens", "host_tokens", "computed_tokens"),
            **self.some("lookup_tokens", "recomputed_tokens"),
            "hit_ratio": self.hit_ratio,
            "hit_tokens_at": self.at_other_sizes,
            **{copies: self._copied(copies) for copies in ("stored", "loaded")},
            "load_times": {
                "median_seconds": self.load_seconds(0.5),
                "slowest_hundredth_seconds": self.load_seconds(0.99),
            },
            "pool": {
                **self.some("slots_in_use", "slots", "pool_slots", "slot_bytes"),
                **self.some("stored_slots", "evictions"),
            },
            "tier": {
                **self.some("tier_slots_in_use", "tier_slots", "has_remote", "tiers_left_alone"),
                **{copies: self._copied(copies) for copies in ("demoted", "promoted")},
                **self.some("demoted_slots", "promoted_slots", "lost_tier_slots"),
                **self.some("tier_slots_set_aside"),
                **self.some(
                    "late_lookups", "late_promotions", "tier_mismatches", "oldest_move_seconds"
                ),
            },
            "skipped": self.skipped,
            "waiting": self.some(*WAITS),
            **self.some("oldest_copy_seconds", "stores_paused"),
            "errors": self.some(*ERRORS),
        }
