"""A second connector for a MultiConnector, which behaves like vLLM's NixlConnector.

Nixl needs a network and a second engine. This one passes KV from a request to a later one of the
same engine, using Nixl's parameters: when a request with `do_remote_decode` ends, its blocks are
held until the worker has saved them and reports `finished_sending`; a request with
`do_remote_prefill` gets them back by an asynchronous load. Like Nixl it raises if handshake
metadata is missing or of another type, and reports its own stats.

Unlike Nixl, but like other connectors, it can have `synchronous` loads, and its workers report to
the scheduler at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tests.support.configurations import around
from tests.support.inputs import transfer_config

NAME = "RemoteConnector"


@dataclass
class RemoteHandshake(KVConnectorHandshakeMetadata):
    """The address of a rank."""

    address: str


@dataclass
class RemoteMetadata(KVConnectorMetadata):
    """The blocks to save and to load in this step, by request; loads also name the source."""

    sends: dict[str, list[int]] = field(default_factory=dict)
    loads: dict[str, tuple[str, int, list[int]]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    """Requests whose sender only learns that nothing is fetched."""


class RemoteReport(KVConnectorWorkerMetadata):
    def aggregate(self, other: KVConnectorWorkerMetadata) -> RemoteReport:
        assert isinstance(other, RemoteReport)
        return self


class RemoteStats(KVConnectorStats):
    """The number of blocks of each load."""

    def reset(self) -> None:
        self.data = {"loaded_blocks": []}

    def aggregate(self, other: KVConnectorStats) -> RemoteStats:
        self.data["loaded_blocks"] += other.data["loaded_blocks"]
        return self

    def reduce(self) -> dict[str, int | float]:
        return {"loaded blocks": sum(self.data["loaded_blocks"])}

    def is_empty(self) -> bool:
        return not self.data.get("loaded_blocks")


class RemotePromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labels: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labels, per_engine)
        family = self._counter_cls(
            name="vllm:remote_loaded_blocks", documentation="Blocks.", labelnames=labels
        )
        self._loaded = {engine: family.labels(*values) for engine, values in per_engine.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._loaded[engine_idx].inc(sum(transfer_stats_data["loaded_blocks"]))


class RemoteConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles; `failing` makes its next loads write garbage and fail.

    Once it is `unreachable` it reports requests in `notices` as received, as Mooncake's connector
    always does in vLLM 0.31.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._synchronous = vllm_config.kv_transfer_config.get_from_extra_config(
            "synchronous", False
        )
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        # Scheduler.
        self.handshake: dict[int, RemoteHandshake] = {}
        self._matched: dict[str, int] = {}
        self._planned = RemoteMetadata()
        self._sending: set[str] = set()
        # Worker.
        self.failing = self.unreachable = False
        self._notices: set[str] = set()
        self.kept: dict[str, list[list[torch.Tensor]]] = {}
        self._caches: list[torch.Tensor] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._stats = RemoteStats({"loaded_blocks": []})

    # -- scheduler -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for one in metadata.values():
            if not isinstance(one, RemoteHandshake):
                raise ValueError(  # noqa: TRY004, as Nixl does
                    f"RemoteConnector expects RemoteHandshake, not {one}"
                )
        if not metadata:
            raise ValueError("RemoteConnector cannot be reached without its metadata")
        self.handshake = dict(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        self._matched[request.request_id] = num_computed_tokens
        tokens = request.num_prompt_tokens - num_computed_tokens - self._synchronous
        return max(0, tokens), tokens > 0 and not self._synchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        if not num_external_tokens:
            self._planned.notices.append(request.request_id)
        else:
            first = self._matched.pop(request.request_id) // self._block_tokens
            (block_ids,) = blocks.get_block_ids()
            last = -(-request.num_prompt_tokens // self._block_tokens)
            self._planned.loads[request.request_id] = (
                params["remote_id"],
                first,
                list(block_ids[first:last]),
            )

    def build_connector_meta(self, scheduler_output: Any) -> RemoteMetadata:
        planned, self._planned = self._planned, RemoteMetadata()
        return planned

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, RemoteReport)
        self._sending -= connector_output.finished_sending or set()

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self._planned.sends[request.request_id] = list(block_ids[0])
        self._sending.add(request.request_id)
        return True, {"do_remote_prefill": True, "remote_id": request.request_id}

    def has_pending_push_work(self) -> bool:
        return bool(self._sending)

    # -- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def get_handshake_metadata(self) -> RemoteHandshake:
        return RemoteHandshake("here")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert isinstance(kv_connector_metadata, RemoteMetadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RemoteMetadata)
        for request_id, blocks in metadata.sends.items():
            self.kept[request_id] = [[c[b].clone() for c in self._caches] for b in blocks]
            self._sent.add(request_id)
        self._notices.update(metadata.notices)
        for request_id, (remote_id, first, blocks) in metadata.loads.items():
            pages = self.kept[remote_id][first : first + len(blocks)]
            for block, page in zip(blocks, pages, strict=True):
                for cache, content in zip(self._caches, page, strict=True):
                    cache[block] = -content if self.failing else content
            if self.failing:
                self._failed_blocks.update(blocks)
            self._stats.data["loaded_blocks"].append(len(blocks))
            if not self._synchronous:
                self._received.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, self._sent = self._sent, set()
        received, self._received = self._received, set()
        if self.unreachable:
            received |= self._notices
            self._notices.clear()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> RemoteReport:
        return RemoteReport()

    # -- stats ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> RemoteStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, RemoteStats({"loaded_blocks": []})
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RemoteStats:
        return RemoteStats(data or {"loaded_blocks": []})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> RemotePromMetrics:
        return RemotePromMetrics(*arguments)


def multi_config(
    plugin: dict[str, Any],
    *,
    first: bool = True,
    role: str = "kv_both",
    remote: dict[str, Any] | None = None,
    **outer: Any,
) -> dict[str, Any]:
    """Return the configuration of a MultiConnector with ours, listed `first` or last, and this."""
    remote_config = {
        "kv_connector": NAME,
        "kv_role": role,
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": remote or {},
    }
    members = [transfer_config(plugin, role), remote_config]
    return around(*(members if first else members[::-1]), role=role, **outer)


# A MultiConnector rebuilds its members' stats by name.
if NAME not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(NAME, __name__, NAME)
