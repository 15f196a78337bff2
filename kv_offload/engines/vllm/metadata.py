"""The plugin's messages as vLLM carries them: each also has the class that vLLM expects."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, WorkerCapacity


class ConnectorMetadata(OffloadMetadata, KVConnectorMetadata):
    """One step's plan, from the scheduler to every worker."""

    @classmethod
    def of(cls, plan: OffloadMetadata) -> ConnectorMetadata:
        """Return a plan as vLLM takes it."""
        return cls(plan.stores, plan.loads)


class ConnectorWorkerMetadata(OffloadWorkerMetadata, KVConnectorWorkerMetadata):
    """What ranks report; vLLM merges their reports with `aggregate`."""

    @classmethod
    def of(cls, report: OffloadWorkerMetadata | None) -> ConnectorWorkerMetadata | None:
        """Return a rank's report as vLLM takes it."""
        return None if report is None else cls(**vars(report))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ConnectorWorkerMetadata:
        """Return what two ranks report together."""
        assert isinstance(other, OffloadWorkerMetadata)
        return self.merge(other)


class HandshakeMetadata(WorkerCapacity, KVConnectorHandshakeMetadata):
    """What a rank holds, told once before the first request."""

    @classmethod
    def of(cls, capacity: WorkerCapacity) -> HandshakeMetadata:
        """Return a rank's capacity as vLLM takes it."""
        return cls(**vars(capacity))
