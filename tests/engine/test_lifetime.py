"""No KV tensor outlives the engine, even if something still holds the plugin's objects."""

from __future__ import annotations

import gc
import logging
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction
from kv_swap.host import transfers
from vllm import LLM
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.v1.engine.core import EngineCoreProc

from kv_offload.errors import UnsupportedError
from kv_offload.worker.worker import OffloadWorker
from tests.engine.harness import engine, engine_settings, greedy, offloading, plain_answers
from tests.support.inputs import random_tokens, transfer_config
from tests.support.processes import run_function, shut_down


@pytest.mark.parametrize("ends", ["as it should", "without shutdown"])
def test_shutdown_leaves_no_kv_tensor_alive(model_folder, monkeypatch, ends):
    """With a control: a rank that is not shut down keeps the KV cache of an engine that is gone."""
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


def test_shutdown_with_work_in_flight(model_folder, copies):
    with engine(model_folder, plugin={}) as ours:
        copies.hold(Direction.STORE)
        ours.add("only", random_tokens(200, seed=2), max_tokens=2)
        ours.run()
        engine_thread = ours.rank.transfer._thread
        assert engine_thread.is_alive()
        copies.release()
    engine_thread.join(120)
    assert not engine_thread.is_alive()


@pytest.mark.parametrize("plugin", [{}, None], ids=["with the plugin", "without"])
def test_a_second_engine_in_the_process_of_the_first_is_refused(model_folder, plugin):
    """vLLM would give it the first one's connector, which would copy the blocks of both engines."""
    prompts = [random_tokens(300, seed=4)]
    expected = plain_answers(model_folder, prompts)
    settings = engine_settings(model_folder, "qwen3")
    if plugin is not None:
        settings["kv_transfer_config"] = transfer_config(plugin)
    with offloading(model_folder) as first:
        assert first.generate(prompts) == expected
        with pytest.raises(UnsupportedError, match="kv-offload: another engine in this"):
            LLM(**settings)
        assert first.reload(prompts) == expected


FAILURES = [
    "cpu_model_runner.CPUModelRunner.initialize_kv_cache",
    "cpu_worker.CPUWorker.compile_or_warm_up_model",
]
"""Where a start fails: before and after the KV cache is registered, as when memory is short."""


def fail_to_start(
    models: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> pytest.ExceptionInfo[RuntimeError]:
    """Make an engine with half the usual host memory fail during its start."""

    def fail(*_arguments: Any, **_more: Any) -> None:
        raise RuntimeError("out of memory")

    settings = engine_settings(models, "qwen3")
    settings["kv_transfer_config"] = transfer_config({"cpu_bytes": "32MiB"})
    with monkeypatch.context() as patch:
        patch.setattr(f"vllm.v1.worker.{method}", fail)
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            LLM(**settings)
    return caught


@pytest.mark.parametrize("method", FAILURES)
def test_after_an_engine_that_failed_to_start_the_next_one_has_its_own_settings(
    model_folder, monkeypatch, method
):
    prompts = [random_tokens(300, seed=5)]
    expected = plain_answers(model_folder, prompts)
    fail_to_start(model_folder, monkeypatch, method)
    with offloading(model_folder, left_over=True) as ours:
        assert ours.rank.num_slots * ours.rank.transfer.layout.slot_bytes == 64 << 20
        assert ours.generate(prompts) == expected
        assert ours.reload(prompts) == expected


@pytest.mark.parametrize("method", FAILURES)
def test_what_is_left_of_a_start_that_failed_serves_no_other_engine(
    model_folder, monkeypatch, method
):
    """A traceback keeps it, as in a notebook. The other engine has other settings and KV cache."""
    caught = fail_to_start(model_folder, monkeypatch, method)
    try:
        with pytest.raises(UnsupportedError, match="another engine in this process"):
            LLM(**engine_settings(model_folder, "qwen3"), kv_transfer_config=transfer_config({}))
        assert caught.value
    finally:
        ensure_kv_transfer_shutdown()


def test_after_an_engine_that_was_deleted_another_one_starts(model_folder, caplog):
    """vLLM shuts it down when it is collected, which may be after the next one is built."""
    prompts = [random_tokens(300, seed=6)]
    expected = plain_answers(model_folder, prompts)
    with caplog.at_level(logging.ERROR, "vllm.renderers"):  # a traceback there holds the engine
        first = LLM(
            **engine_settings(model_folder, "qwen3"),
            kv_transfer_config=transfer_config({"cpu_bytes": "32MiB"}),
        )
    first.llm_engine.engine_core._finalizer.detach()  # otherwise it is collected here at once
    del first
    with offloading(model_folder, left_over=True) as ours:
        assert ours.rank.num_slots * ours.rank.transfer.layout.slot_bytes == 64 << 20
        assert ours.generate(prompts) == expected
        assert ours.reload(prompts) == expected


def end_out_of_order(models: str, what: str) -> list[int]:
    """Return how the core of an engine ended."""
    settings = engine_settings(Path(models), "qwen3")
    run = EngineCoreProc.run_busy_loop

    def miss_the_signal(core: EngineCoreProc) -> None:
        # Another thread takes the signal, so the main thread sleeps on, as it also does when the
        # signal arrives just before it goes to sleep.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        run(core)

    # The core is forked, and inherits this.
    if what == "missed its signal":
        EngineCoreProc.run_busy_loop = miss_the_signal
    else:
        pytest.MonkeyPatch().setattr("kv_offload.worker.worker.DRAIN_SECONDS", 1.0)
        transfers.copy_runs = lambda *_: time.sleep(1000)
        settings["kv_transfer_config"] = transfer_config({"cpu_bytes": "8MiB"})
    llm = LLM(**settings)
    if what != "missed its signal":
        prompt = {"prompt_token_ids": random_tokens(300, seed=1)}
        llm.generate([prompt], greedy(8), use_tqdm=False)
    processes = llm.llm_engine.engine_core.resources.engine_manager.processes
    shut_down(llm)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("what", ["missed its signal", "has stores that do not end"])
def test_a_core_that_cannot_end_in_order_ends_all_the_same(model_folder, what):
    """This is how the tests shut engines down: vLLM alone waits for the core, and then kills it."""
    (status,) = run_function(end_out_of_order, model_folder, what, processes=True)
    assert status == 0
