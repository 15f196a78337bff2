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


def _metrics(kind: Literal["counter", "gauge"], **documentation: str) -> list[Metric]:
    return [Metric(name, kind, text) for name, text in documentation.items()]


METRICS = (
    *_metrics(
        "counter",
        lookup_tokens="Tokens looked up in host memory after the GPU prefix cache.",
        hit_tokens="Tokens loaded from host memory instead of being computed.",
        recomputed_tokens="Tokens that host memory had but that were computed, since that was "
        "sooner.",
        evictions="Slots whose content was replaced.",
        stored_bytes="Bytes copied to host memory, over all ranks.",
        stored_seconds="Time from submitting stores to their end, over all ranks.",
        loaded_bytes="Bytes copied from host memory, over all ranks.",
        loaded_seconds="Time from submitting loads to their end, over all ranks.",
        synchronous_loads="Loads that the forward of their step waited for.",
        failed_loads="Requests whose load failed and that were recomputed.",
        repaired_loads="Loads that failed just before a forward and were copied at once, over all "
        "ranks.",
        lost_requests="Requests that ended with an error since a forward read KV that was not "
        "loaded.",
        hook_errors="Errors within the plugin that the engine survived.",
        **{
            f"skipped_{reason}": f"Slots not stored: {reason.replace('_', ' ')}."
            for reason in SKIP_REASONS
        },
        deferred_slots="Slots of ended requests that no store budget was left for and that wait "
        "for one.",
    ),
    *_metrics(
        "gauge",
        slots_in_use="Slots that hold KV or are being written.",
        slots="Slots in the pool that may be used.",
        running_loads="Loads that some rank has not completed.",
        running_stores="Stores that some rank has not completed.",
        pinned_blocks="GPU blocks kept from reuse until their store has ended.",
        waiting_slots="Slots of ended requests that wait to be stored.",
        load_bytes_per_second="Speed of loads that ran alone, of the slowest rank; 0 until it was "
        "measured.",
        prefill_tokens_per_second="Speed of computing prompts in large steps; 0 until it was "
        "measured.",
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
