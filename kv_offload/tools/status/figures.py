"""What the samples of a page mean: totals, and what has changed since an earlier reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class Copies:
    """Bytes copied in one direction, over all ranks."""

    bytes: Count
    bytes_per_second: float
    """While copies ran, waiting time included; 0 before the first."""


@dataclass(frozen=True)
class Pool:
    """Slots in host memory, under the names of the metrics."""

    slots_in_use: float
    slots: float
    """Those that are ready: their memory is page-locked on every rank."""
    pool_slots: float
    """All, ready or not."""
    slot_bytes: float
    stored_slots: Count
    evictions: Count


@dataclass(frozen=True)
class LoadTimes:
    """How long a load takes, as far as the buckets of the histogram tell; None before the first."""

    median_seconds: float | None
    slowest_hundredth_seconds: float | None


@dataclass(frozen=True)
class Figures:
    """What one engine does, or several together."""

    engines: tuple[str, ...]
    model: str
    seconds: float | None
    """Between the readings."""
    prompt_tokens: Count
    """Of requests that were admitted. Each token came from one of the three that follow."""
    gpu_tokens: Count
    host_tokens: Count
    computed_tokens: Count
    lookup_tokens: Count
    recomputed_tokens: Count
    stored: Copies
    loaded: Copies
    load_times: LoadTimes
    pool: Pool
    skipped: Mapping[str, Count]
    """Slots not stored, by reason."""
    waiting: Mapping[str, float]
    oldest_copy_seconds: float
    """The age of the oldest load or store that has not ended; of several engines, the largest."""
    errors: Mapping[str, float]


def figures(
    now: Reading, before: Reading | None = None, engines: Sequence[str] | None = None
) -> Figures:
    """Return the figures of these engines, by default of all."""
    chosen = tuple(now.engines if engines is None else engines)
    seconds = None if before is None else now.taken - before.taken

    def total(reading: Reading, name: str, prefix: str = PREFIX) -> float:
        return sum(reading.values.get((prefix + name, engine), 0.0) for engine in chosen)

    def largest(name: str) -> float:
        return max(now.values.get((PREFIX + name, engine), 0.0) for engine in chosen)

    def counted(value: Callable[[Reading], float]) -> Count:
        newest = value(now)
        if before is None or not seconds:
            return Count(newest, None)
        growth = newest - value(before)
        return Count(newest, growth / seconds if growth >= 0 else None)

    def counter(name: str, prefix: str = PREFIX) -> Count:
        return counted(lambda reading: total(reading, f"{name}_total", prefix))

    def computed(reading: Reading) -> float:
        asked = total(reading, "queries_total", OF_VLLM)
        cached = total(reading, "hits_total", OF_VLLM) + total(reading, "hit_tokens_total")
        # A request that was preempted is looked up again, which vLLM's counters leave out.
        return max(0.0, asked - cached)

    def copies(name: str) -> Copies:
        busy = counter(f"{name}_seconds").total
        copied = counter(f"{name}_bytes")
        return Copies(copied, copied.total / busy if busy else 0.0)

    return Figures(
        engines=chosen,
        model=now.model,
        seconds=seconds,
        prompt_tokens=counter("queries", OF_VLLM),
        gpu_tokens=counter("hits", OF_VLLM),
        host_tokens=counter("hit_tokens"),
        computed_tokens=counted(computed),
        lookup_tokens=counter("lookup_tokens"),
        recomputed_tokens=counter("recomputed_tokens"),
        stored=copies("stored"),
        loaded=copies("loaded"),
        load_times=LoadTimes(*(_quantile(now, chosen, share) for share in (0.5, 0.99))),
        pool=Pool(
            total(now, "slots_in_use"),
            total(now, "slots"),
            total(now, "pool_slots"),
            largest("slot_bytes"),
            counter("stored_slots"),
            counter("evictions"),
        ),
        skipped={reason: counter(f"skipped_{reason}") for reason in SKIP_REASONS},
        waiting={name: total(now, name) for name in WAITS},
        oldest_copy_seconds=largest("oldest_copy_seconds"),
        errors={name: counter(name).total for name in ERRORS},
    )


def _quantile(reading: Reading, engines: Sequence[str], share: float) -> float | None:
    """Return the time that this share of all loads took at most, as Prometheus estimates it."""
    counts: dict[float, float] = {}
    for engine in engines:
        for bound, up_to in reading.buckets.get((f"{PREFIX}load_seconds", engine), {}).items():
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
