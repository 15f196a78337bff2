"""The name, kind and help of every metric, and the figures that scheduler and worker count.

In Prometheus, names start with `PREFIX`: vLLM clears metrics with its own prefix when a second
engine is built in a process, and the prefixes of its own offloading connectors are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
SkipReason = Literal[
    "moved_on",
    "not_worth_it",
    "in_pool",
    "no_budget",
    "pool_busy",
    "copy_failed",
    "unpackable",
    "not_wanted",
    "paused",
]

SKIP_REASONS: Mapping[SkipReason, str] = {
    "moved_on": "Slots not stored because vLLM reused the block before it could be stored.",
    "not_worth_it": "Slots not stored because eviction_policy auto expects more hits from what "
    "they would displace.",
    "in_pool": "Slots not stored because another engine in the host_pool has the block.",
    "no_budget": "Slots not stored because too many waited, host memory was emptied, stores were "
    "paused, or the engine came to rest.",
    "pool_busy": "Slots not stored because every slot of host memory was being read or written.",
    "copy_failed": "Slots not stored because the copy failed; the log has the error.",
    "unpackable": "Slots not stored because their block does not fit a packed slot (pack_kv).",
    "not_wanted": "Slots not stored because their request asked for that.",
    "paused": "Slots of requests that ended while stores were paused, and that were not stored.",
}
"""Why a full slot was not stored. `skipped_<reason>` counts it; the text is its help."""

PREFIX = "vllm:host_kv_cache_"

OTHER_SIZES: Mapping[str, float] = {"half": 0.5, "same": 1, "twice": 2, "four_times": 4}
"""Sizes of host memory for which hits are estimated, by the suffix of the metric's name."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure: `name` in the stats, `vllm:host_kv_cache_<name>` in Prometheus."""

    name: str
    kind: Kind
    documentation: str
    buckets: tuple[float, ...] = ()
    """A histogram's upper bounds, without infinity."""


def _metrics(kind: Literal["counter", "gauge"], **documentation: str) -> list[Metric]:
    return [Metric(name, kind, text) for name, text in documentation.items()]


METRICS = (
    *_metrics(
        "counter",
        lookup_tokens="Tokens of prompts looked up in host memory, after the GPU's own hits.",
        hit_tokens="Tokens loaded from host memory instead of being computed.",
        recomputed_tokens="Tokens that host memory had but that were faster to compute.",
        hit_tokens_at_half="Estimate: tokens that host memory would have had at half its size.",
        hit_tokens_at_same="Tokens that host memory had, loaded or not; with a lower tier or a "
        "host pool an estimate.",
        hit_tokens_at_twice="Estimate: tokens that host memory would have had at twice its size.",
        hit_tokens_at_four_times="Estimate: tokens that host memory would have had at four times "
        "its size.",
        stored_slots="Slots that became readable: stored, or read from below, on every rank.",
        quota_evictions="Slots emptied because their tenant had more than max_share_per_salt.",
        evictions="Slots whose content was replaced by another block's.",
        stored_bytes="Bytes of blocks copied to host memory, over all ranks.",
        stored_seconds="Time from submitting stores to their end, over all ranks.",
        sampled_tiles="Tiles of packed slots that were sampled, one in 251 (pack_kv).",
        sampled_escapes="Escapes in sampled_tiles; 38 to 45 of them fit a tile.",
        sampled_raw_tiles="Raw tiles among sampled_tiles: with more escapes than fit.",
        loaded_bytes="Bytes of blocks copied from host memory, over all ranks.",
        loaded_seconds="Time from when loads could start to their end, over all ranks.",
        peers_read_bytes="The part of loaded_bytes that came from host memory of peers in the "
        "host_pool.",
        synchronous_loads="Loads that the forward of their step waited for.",
        failed_loads="Requests whose load failed and that were recomputed.",
        repaired_loads="Loads that failed just before a forward and were copied at once, over all "
        "ranks.",
        lost_requests="Requests that ended with an error because a forward read KV that was not "
        "loaded.",
        hook_errors="Errors within the plugin that the engine survived.",
        **{f"skipped_{reason}": text for reason, text in SKIP_REASONS.items()},
        requests_with_hints="Requests with hints in kv_transfer_params.",
        ignored_hints="Requests whose hints could not be read, and were ignored.",
        followed_kv_hints="Actions of routers' KV hints that were followed.",
        ignored_kv_hints="Actions of routers' KV hints that are malformed, or for others.",
        unretained_slots="Slots to be retained for which there was no room in the share.",
        deferred_slots="Slots that were not stored yet when their request ended; see "
        "waiting_slots.",
        demoted_slots="Slots written from host memory to lower tiers, on every rank.",
        promoted_slots="Slots read from lower tiers into host memory, on every rank.",
        prefetched_slots="The part of promoted_slots that was read for queued requests.",
        lost_tier_slots="Slots that could not be written to a lower tier or read from it; "
        "their tokens are computed.",
        late_lookups="Requests served without the remote store because its lookup took too long.",
        late_promotions="Requests computed because reading from lower tiers took too long.",
        demoted_bytes="Bytes written to lower tiers, over all ranks.",
        demoted_seconds="Time from the start of writes to their end, over all ranks.",
        promoted_bytes="Bytes read from lower tiers, over all ranks.",
        promoted_seconds="Time from the start of reads to their end, over all ranks.",
        disk_read_bytes="The part of promoted_bytes that came from the disk.",
        disk_written_bytes="The part of demoted_bytes that went to the disk.",
        remote_read_bytes="The part of promoted_bytes that came from the remote store.",
        remote_written_bytes="The part of demoted_bytes that went to the remote store.",
        tier_mismatches="Slots of a lower tier whose name or checksum was wrong, over all ranks; "
        "they were not used.",
        tier_errors="Failed reads and writes of a lower tier, over all ranks; the log has them.",
        trace_errors="Requests that could not be written to the file of record_trace.",
    ),
    *_metrics(
        "gauge",
        slots_in_use="Slots that hold KV or are being written.",
        slots="Slots whose memory is ready on every rank, as of the engine's last step.",
        pool_slots="Slots that the pool has when all of its memory is ready.",
        adopted_slots="Slots that had KV when this engine started, from one before it in the same "
        "host_pool.",
        slot_bytes="Bytes of one slot on one rank.",
        block_bytes="Bytes of one block on one rank, more than slot_bytes where pack_kv packs it.",
        running_loads="Loads that some rank has not completed.",
        running_stores="Stores that some rank has not completed.",
        oldest_copy_seconds="Age of the oldest load or store that some rank has not ended, or 0.",
        pinned_blocks="GPU blocks kept from reuse until their store has ended.",
        waiting_slots="Slots of ended requests that wait to be stored.",
        retained_slots="Slots kept from eviction because requests asked to retain them.",
        stores_paused="1 while stores are paused, by an operator or because too many blocks did "
        "not fit packed slots, else 0.",
        load_bytes_per_second="Speed of loads that ran alone, of the slowest rank; 0 until "
        "measured.",
        tier_slots="Slots that the disk has.",
        tier_slots_in_use="Slots of the disk that hold KV or are being written.",
        tier_slots_set_aside="Slots of the disk left out until the next start, after an error.",
        has_remote="1 with a remote store, 0 without.",
        peers="Other engines of the host_pool, running or not, from whose host memory loads read.",
        peer_slots="Slots of peers that loads can read; grows as their memory is page-locked.",
        leased_slots="Slots of peers that loads of this engine hold; one counts once per load.",
        disk_usable="1 while the disk may be read; 0 after an error, and without one.",
        remote_usable="1 while the remote store may be read; 0 after an error or a late answer, "
        "and without one.",
        promoting_slots="Slots that are being read from lower tiers.",
        demoting_slots="Slots that are being written to lower tiers.",
        oldest_move_seconds="Age of the oldest read or write of a lower tier that some rank has "
        "not ended; 0 if there is none.",
        disk_read_bytes_per_second="Read speed of the disk, of the slowest rank; 0 until measured.",
        remote_read_bytes_per_second="Read speed of the remote store, of the slowest rank; 0 until "
        "measured.",
        prefill_tokens_per_second="Speed of computing prompts in large steps; 0 until measured.",
    ),
    Metric(
        "load_seconds",
        "histogram",
        "Time from when a load could start to its end, on the first rank; one value for each load.",
        # 0.1 ms, where a load is all overhead, to 5 s, where something is wrong. Includes 0.5 ms
        # and 100 ms, the limits of synchronous loads alongside other requests, and alone.
        tuple(step * 10.0**power for power in range(-4, 1) for step in (1, 2.5, 5)),
    ),
    Metric(
        "load_bytes",
        "histogram",
        "Bytes of a load on the first rank; one value for each load.",
        # 64 KiB, a block of a small model, to 16 GiB, a long prompt of a large one. Includes 16
        # MiB, at and above which a synchronous load arrives in waves.
        tuple(4.0**power for power in range(8, 18)),
    ),
    Metric(
        "request_hit_tokens",
        "histogram",
        "Tokens that a hit saved its request from computing; one value for each hit.",
        # A few blocks to 262,144 tokens, doubling: the saved time grows with the tokens.
        tuple(2.0**power for power in range(6, 19)),
    ),
)
KINDS: Mapping[str, Kind] = {metric.name: metric.kind for metric in METRICS}


@dataclass
class OffloadStats:
    """Figures by metric name, in a flat dictionary that can be sent to another process.

    Counters add up, a gauge keeps its last value, a histogram has a list of values.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, amount: float) -> None:
        """Add to a counter."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.data[name] = value

    def observe(self, name: str, *values: float) -> None:
        """Add values to a histogram."""
        self.data.setdefault(name, []).extend(values)

    def take(self) -> OffloadStats | None:
        """Return the figures since the last call; None if there are none."""
        data, self.data = self.data, {}
        return OffloadStats(data) if data else None

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not self.data
