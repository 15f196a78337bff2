"""No KV tensor outlives the engine, whoever still holds the plugin's objects."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from kv_offload.worker.worker import OffloadWorker
from tests.engine.harness import draft_head, engine, offloading, random_tokens


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("ends", ["as it should", "without shutdown"])
def test_shutdown_leaves_no_kv_tensor_alive(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ends: str
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
    with offloading(model_folder, kind) as ours:
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


@pytest.mark.parametrize("plugin", [None, {}], ids=["without us", "with us"])
@pytest.mark.parametrize("drafts", [False, True], ids=["model", "model and draft head"])
def test_an_engine_that_ended_holds_no_kv_tensor(
    model_folder: Path, plugin: dict[str, Any] | None, drafts: bool
) -> None:
    """Whatever the model's layers hold, a draft head's included; vLLM alone keeps none either."""
    arguments = {"speculative_config": draft_head(model_folder)} if drafts else {}
    with engine(model_folder, "llama", plugin, **arguments) as running:
        running.generate([random_tokens(200, seed=1)])
        watched = running.watch_kv_tensors()
        assert len(watched) == (4 if drafts else 2)
        assert all(reference() is not None for reference in watched.values())
    gc.collect()
    assert not [name for name, reference in watched.items() if reference() is not None]
