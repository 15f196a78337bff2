"""The plugin's messages as vLLM carries them: each also has the class that vLLM expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, WorkerCapacity

Kind = TypeVar("Kind")


def convert(message: Any, kind: Callable[..., Kind]) -> Kind:
    """Return one of the plugin's messages as one of the classes below."""
    return kind(**vars(message))


class ConnectorMetadata(OffloadMetadata, KVConnectorMetadata):
    """One step's plan, from the scheduler to every worker."""


class ConnectorWorkerMetadata(OffloadWorkerMetadata, KVConnectorWorkerMetadata):
    """What ranks report."""

    aggregate = OffloadWorkerMetadata.merge  # vLLM's name for it

    @classmethod
    def of(cls, report: OffloadWorkerMetadata | None) -> ConnectorWorkerMetadata | None:
        """Return what a rank reports, if anything, as vLLM takes it."""
        return None if report is None else convert(report, cls)


class HandshakeMetadata(WorkerCapacity, KVConnectorHandshakeMetadata):
    """What a rank holds, told once before the first request."""
