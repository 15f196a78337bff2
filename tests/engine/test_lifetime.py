"""No KV tensor outlives the engine, whoever still holds the plugin's objects."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction

from kv_offload.worker.worker import OffloadWorker
from tests.engine.copies import Copies
from tests.engine.harness import engine, offloading, random_tokens


@pytest.mark.parametrize("ends", ["as it should", "without shutdown"])
def test_shutdown_leaves_no_kv_tensor_alive(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """With a control: a rank that is not shut down keeps the KV cache of a gone engine."""
    registered: list[weakref.ref[Any]] = []
    held: list[OffloadWorker] = []
    register, shutdown = OffloadWorker.register_kv_caches, OffloadWorker.shutdown

    def watch(worker: OffloadWorker, kv_caches: dict[str, Any]) -> None:
        registered.extend(map(weakref.ref, kv_caches.values()))
        held.append(worker)  # as a profiler, a traceback or another connector may
        register(worker, kv_caches)

    monkeypatch.setattr(OffloadWorker, "register_kv_caches", watch)
    if ends == "without shutdown":
        monkeypatch.setattr(OffloadWorker, "shutdown", lambda worker: None)
    prompt = random_tokens(200, seed=1)
    with offloading(model_folder, "gemma3") as ours:
        ours.generate([prompt])
        ours.reload([prompt])
    gc.collect()
    assert registered
    alive = [reference for reference in registered if reference() is not None]
    assert bool(alive) == (ends == "without shutdown")
    for worker in held:
        shutdown(worker)
    gc.collect()
    assert all(reference() is None for reference in registered)


def test_shutdown_with_work_in_flight(model_folder: Path, copies: Copies) -> None:
    with engine(model_folder, plugin={}) as ours:
        copies.hold(Direction.STORE)
        ours.add("only", random_tokens(200, seed=2), max_tokens=2)
        ours.run()
        engine_thread = ours.rank.transfer._thread
        assert engine_thread.is_alive()
        copies.release()
    engine_thread.join(120)
    assert not engine_thread.is_alive()
