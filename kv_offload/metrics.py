"""The name, kind and help of every metric, and the figures that scheduler and worker count.

In Prometheus names start with `PREFIX`: vLLM clears what carries its own prefix when a second
engine is built in a process, and the prefixes of its own offloading connectors are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

SkipReason = Literal["moved_on", "used_too_little", "no_budget", "pool_busy", "copy_failed"]
"""Why a full slot was not stored.

moved_on: the engine gave a block to somebody else before its store was planned, also where the
    store had waited for a budget.
used_too_little: `store_after_uses` is not reached.
no_budget: it waited for a budget behind too many others, or none would ever have been left.
pool_busy: every slot of the pool is being read or written.
copy_failed: a rank reported an error.
"""
SKIP_REASONS: tuple[SkipReason, ...] = get_args(SkipReason)

PREFIX = "vllm:host_kv_cache_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure: `name` in the stats, `vllm:host_kv_cache_<name>` in Prometheus."""

    name: str
    kind: Literal["counter", "gauge"]
    documentation: str


METRICS = (
    Metric(
        "lookup_tokens", "counter", "Tokens looked up in host memory after the GPU prefix cache."
    ),
    Metric("hit_tokens", "counter", "Tokens loaded from host memory instead of being computed."),
    Metric(
        "recomputed_tokens",
        "counter",
        "Tokens that host memory had but that were computed, since that was sooner.",
    ),
    Metric("evictions", "counter", "Slots whose content was replaced."),
    Metric("stored_bytes", "counter", "Bytes copied to host memory, over all ranks."),
    Metric(
        "stored_seconds", "counter", "Time from submitting stores to their end, over all ranks."
    ),
    Metric("loaded_bytes", "counter", "Bytes copied from host memory, over all ranks."),
    Metric("loaded_seconds", "counter", "Time from submitting loads to their end, over all ranks."),
    Metric("synchronous_loads", "counter", "Loads that the forward of their step waited for."),
    Metric("failed_loads", "counter", "Requests whose load failed and that were recomputed."),
    Metric(
        "repaired_loads",
        "counter",
        "Loads that failed just before a forward and were copied at once, over all ranks.",
    ),
    Metric(
        "lost_requests",
        "counter",
        "Requests that ended with an error since a forward read KV that was not loaded.",
    ),
    Metric("hook_errors", "counter", "Errors within the plugin that the engine survived."),
    *(
        Metric(f"skipped_{reason}", "counter", f"Slots not stored: {reason.replace('_', ' ')}.")
        for reason in SKIP_REASONS
    ),
    Metric(
        "deferred_slots",
        "counter",
        "Slots of ended requests that no store budget was left for and that wait for one.",
    ),
    Metric("slots_in_use", "gauge", "Slots that hold KV or are being written."),
    Metric("slots", "gauge", "Slots in the pool that may be used."),
    Metric("running_loads", "gauge", "Loads that some rank has not completed."),
    Metric("running_stores", "gauge", "Stores that some rank has not completed."),
    Metric("pinned_blocks", "gauge", "GPU blocks kept from reuse until their store has ended."),
    Metric("waiting_slots", "gauge", "Slots of ended requests that wait to be stored."),
    Metric(
        "load_bytes_per_second",
        "gauge",
        "Speed of loads that ran alone, of the slowest rank; 0 until it was measured.",
    ),
    Metric(
        "prefill_tokens_per_second",
        "gauge",
        "Speed of computing prompts in large steps; 0 until it was measured.",
    ),
)
KINDS = {metric.name: metric.kind for metric in METRICS}


@dataclass
class OffloadStats:
    """Figures by metric name, in a flat dictionary: counters add up, a gauge has its last value."""

    data: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, amount: float) -> None:
        """Add to a counter."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.data[name] = value

    def is_empty(self) -> bool:
        """Tell whether there is nothing to report."""
        return not self.data
