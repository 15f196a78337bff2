"""vLLM's KV events about host memory and a disk, and spans for its OpenTelemetry tracer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from kv_offload.scheduler.events.announcer import Announcement, BlocksRemoved, BlocksStored
from kv_offload.scheduler.spans import ReportSpan, TraceSpan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MEDIA = {"": "CPU", "disk": "STORAGE"}
"""vLLM's names by tier. Routers may mistake an unknown name for the GPU."""

Description: TypeAlias = tuple[int | None, str | None, tuple[Any, ...] | None]
"""The LoRA adapter's id and name, and the block hash's other extra keys."""

NOTHING: Description = (None, None, None)


def events_are_on(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM publishes events about its blocks."""
    config = vllm_config.kv_events_config
    return config is not None and config.enable_kv_cache_events


def describe_blocks(
    request: Request, first_token: int, end_token: int, block_tokens: int
) -> list[Description] | None:
    """Return, per block, what its hash covers besides tokens; None if nothing. See `Describe`."""
    lora = request.lora_request
    embeds = getattr(request, "prompt_embeds", None)
    if lora is None and not request.mm_features and not request.cache_salt and embeds is None:
        return None
    descriptions: list[Description] = []
    adapter = (None, None) if lora is None else (lora.adapter_id, lora.name)
    place = 0  # index among the multimodal inputs
    for first in range(first_token, end_token, block_tokens):
        keys, place = kv_cache_utils.generate_block_hash_extra_keys(
            request, first, first + block_tokens, place
        )
        descriptions.append((*adapter, keys))
    return descriptions


class EventMaker:
    """Turns announcements into vLLM's events."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        # Event fields that describe the layers, by cache group.
        self._kinds = [_kind_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]

    def make(self, announcements: Iterable[Announcement]) -> list[KVCacheEvent]:
        """Return an event for each announcement, in order."""
        return [
            self._stored(one) if isinstance(one, BlocksStored) else self._removed(one)
            for one in announcements
        ]

    def _stored(self, blocks: BlocksStored) -> BlockStored:
        group, parent = blocks.group, blocks.parent
        descriptions: Sequence[Description] = [one or NOTHING for one in blocks.descriptions]
        lora_id, lora_name, _ = descriptions[0] if descriptions else NOTHING
        extra_keys = kv_cache_utils.to_event_extra_keys([keys for _, _, keys in descriptions])
        return BlockStored(
            block_hashes=_external(blocks.hashes),
            parent_block_hash=None if parent is None else _external([parent])[0],
            token_ids=blocks.tokens,
            # 0 for blocks without tokens, as in vLLM's own events: routers rely on that.
            block_size=group.block_tokens if blocks.tokens else 0,
            lora_id=lora_id,
            lora_name=lora_name,
            extra_keys=extra_keys if descriptions else None,
            **self._kinds[group.group_id],
            **_place_of(blocks),
        )

    def _removed(self, blocks: BlocksRemoved) -> BlockRemoved:
        return BlockRemoved(block_hashes=_external(blocks.hashes), **_place_of(blocks))


def _place_of(blocks: Announcement) -> dict[str, Any]:
    return {
        "medium": MEDIA[blocks.tier],
        "group_idx": blocks.group.group_id,
        "locality": "LOCAL",
    }


def _kind_of(spec: Any) -> dict[str, Any]:
    """Return the event fields that describe the layers of a cache group."""
    from vllm.v1 import kv_cache_interface as interface

    return {
        "kv_cache_spec_kind": interface.get_kv_cache_spec_kind(spec).value,
        "kv_cache_spec_sliding_window": interface.get_kv_cache_spec_sliding_window(spec),
    }


def _external(hashes: Sequence[bytes]) -> list[Any]:
    """Return hashes as vLLM publishes them: as bytes, or as integers if its environment says so."""
    convert = kv_cache_utils.maybe_convert_block_hash
    return [convert(block_hash) for block_hash in hashes]


def find_tracer(vllm_config: VllmConfig) -> ReportSpan | None:
    """Return a function that reports spans; None without `--otlp-traces-endpoint`."""
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return None
    from opentelemetry import trace
    from vllm.tracing import extract_trace_context

    tracer = trace.get_tracer("kv_offload")

    def report(span: TraceSpan) -> None:
        # Without headers from the client this starts a new trace, as vLLM's own span does.
        context = extract_trace_context(span.request.trace_headers)
        attributes = {**span.attributes, "gen_ai.request.id": span.request.request_id}
        copied = tracer.start_span(
            span.name, context, start_time=span.start_ns, attributes=attributes
        )
        if not span.ok:
            copied.set_status(trace.StatusCode.ERROR)
        copied.end(span.end_ns)

    return report
