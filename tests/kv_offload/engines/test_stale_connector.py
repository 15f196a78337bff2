"""What vLLM left of an engine of this process is ended once the engine is gone, and not before.

`tests/engine/test_lifetime.py` has real engines.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

import kv_offload.engines.vllm.connector  # noqa: F401 - of an engine with the plugin
from kv_offload.engines.vllm.start.command_line import end_stale_connector


class Worker:
    """Stands for vLLM's worker, which is part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


class Connector:
    """Stands for the connector that vLLM has for a worker."""

    offload_worker = object()
    ended = False

    def __init__(self, worker: Worker) -> None:
        self._worker = weakref.ref(worker)

    @property
    def engine_is_gone(self) -> bool:
        return self._worker() is None

    def shutdown(self) -> None:
        self.ended = True


@pytest.mark.parametrize("lives", [False, True])
def test_an_engine_that_is_gone_is_noticed(monkeypatch, lives):
    """What was there at the end of a start is frozen, and no collection sees it."""
    worker: Any = Worker()
    connector = Connector(worker)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    gc.freeze()
    if not lives:
        del worker
    end_stale_connector()
    assert connector.ended == (not lives)
    assert (kv_transfer_state._KV_CONNECTOR_AGENT is None) == (not lives)
    assert gc.get_freeze_count() > 0
