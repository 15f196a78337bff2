"""The list of patches, how they are installed, and what the smaller ones do."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from kv_offload.config import OffloadConfig
from kv_offload.engines.vllm.locate import connectors_in
from kv_offload.engines.vllm.patches import PATCHES, install_for_scheduler
from kv_offload.engines.vllm.patches import patch as mechanics
from kv_offload.engines.vllm.patches.patch import MARK, Patch, log_new
from kv_offload.engines.vllm.versions import OLDEST, vllm_version
from tests.support.configurations import ours
from tests.support.played_cases import PROMPT
from tests.support.played_engine import PlayedEngine
from tests.support.remote_connector import multi_config

CLASSES = [patch for patch in PATCHES if patch.where != "rank"]


def named(method: str) -> Patch:
    (found,) = [patch for patch in PATCHES if patch.method == method]
    return found


def owner_of(patch: Patch) -> Any:
    module, _, path = patch.target.partition(":")
    return getattr(importlib.import_module(module), path.partition(".")[0])


def patch_vllm(version: tuple[int, int] = vllm_version(), **config: Any) -> None:
    install_for_scheduler(version, OffloadConfig(cpu_bytes=1, **config))


def wrap(monkeypatch: pytest.MonkeyPatch, method: str, original: Callable[..., Any]) -> Any:
    """Put the wrapper of a patch around `original`; return the class of vLLM that has it."""
    owner = owner_of(named(method))
    monkeypatch.setattr(owner, method, named(method).wrap(original))
    return owner


def test_every_patch_is_documented():
    page = (Path(__file__).parents[3] / "docs/design/patches.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
    assert [target for target, *_ in rows] == [f"`{p.target.rpartition(':')[2]}`" for p in PATCHES]
    for patch, (_, condition, *reasons) in zip(PATCHES, rows, strict=True):
        assert (condition != "always") == (patch.needed is not None)
        assert [reason[-1:] for reason in reasons] == [".", "."]


@pytest.mark.parametrize("patch", CLASSES, ids=lambda patch: patch.target)
def test_every_patched_method_is_vllms_own(patch):
    """A renamed method must fail here, not at a reset."""
    assert callable(vars(owner_of(patch))[patch.method])


ALWAYS = {
    "reset_prefix_cache",
    "collective_rpc",
    "update_from_output",
    "_preempt_request",
    "_update_request_as_session",
    "prefix_cache_lookup_enabled",
    "_mamba_block_aligned_split",
}


@pytest.mark.parametrize(
    ("version", "config", "found"),
    [
        ((0, 33), {}, set()),
        ((0, 32), {}, set()),
        ((0, 31), {}, {"_cache_partial_tail_block"}),
        ((0, 33), {"keep_on_sleep": True}, {"sleep"}),
    ],
)
def test_only_what_is_needed_is_patched(version, config, found, monkeypatch):
    wrapped: list[Patch] = []
    monkeypatch.setattr(Patch, "install_on_class", lambda patch: wrapped.append(patch))
    patch_vllm(version, **config)
    assert {patch.method for patch in wrapped} == ALWAYS | found


def test_parameters_that_vllm_cannot_send_to_its_engine_are_refused_as_wrong_ones_are(monkeypatch):
    owner = wrap(monkeypatch, "process_inputs", lambda *_: "taken")

    def process(**transfer: Any) -> Any:
        params = SimpleNamespace(extra_args={"kv_transfer_params": transfer})
        return owner.process_inputs(None, "0", {}, params)

    deep: Any = 1
    for _ in range(400):
        deep = {"a": deep}
    assert process(remote_block_ids=[[1], [2]]) == "taken"
    for wrong in ({"kv_offload": 5}, {"remote": deep}):
        with pytest.raises(VLLMValidationError, match=r"kv-offload: kv_transfer_params"):
            process(**wrong)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's classes have no patch; what a test installs is taken back."""
    for patch in CLASSES:
        method = getattr(owner_of(patch), patch.method)
        while hasattr(method, MARK):
            method = method.__wrapped__
        monkeypatch.setattr(owner_of(patch), patch.method, method)


@pytest.mark.usefixtures("restored")
def test_a_second_call_replaces_nothing_and_logs_nothing(caplog, monkeypatch):
    monkeypatch.setattr(mechanics, "_unlogged", [])
    caplog.set_level(logging.DEBUG, "kv_offload")
    before = EngineCore.reset_prefix_cache
    patch_vllm()
    log_new()
    installed = EngineCore.reset_prefix_cache
    assert installed is not before
    (line,) = caplog.messages
    assert "EngineCore.reset_prefix_cache, EngineCore.collective_rpc" in line
    patch_vllm()
    log_new()
    assert EngineCore.reset_prefix_cache is installed
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("ours_first", [True, False])
def test_wrappers_of_other_plugins_stay(ours_first, monkeypatch):
    """Ours drops the hashes of what a session has not computed."""
    told: list[Any] = []

    def update(self: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
        told.append("vLLM")
        return session.block_hashes, args, kwargs

    def other() -> None:
        original = Scheduler._update_request_as_session

        @functools.wraps(original)
        def update(*args: Any, **kwargs: Any) -> Any:
            told.append("other")
            return original(*args, **kwargs)

        monkeypatch.setattr(Scheduler, "_update_request_as_session", update)

    def plugin() -> None:
        patch_vllm(OLDEST)

    monkeypatch.setattr(Scheduler, "_update_request_as_session", update)
    for install in (plugin, other) if ours_first else (other, plugin):
        install()
    with_both = Scheduler._update_request_as_session
    plugin()
    assert Scheduler._update_request_as_session is with_both, (
        "ours is found below another that names what it wraps"
    )
    scheduler = object.__new__(Scheduler)
    scheduler.hash_block_size, scheduler.has_mamba_layers = 4, False
    scheduler.num_spec_tokens = 0
    session = SimpleNamespace(num_computed_tokens=9, num_tokens=7, block_hashes=["a", "b"])
    assert scheduler._update_request_as_session(session, 1, more=2) == (["a"], (1,), {"more": 2})
    assert told == ["other", "vLLM"]


@pytest.mark.parametrize(
    ("place", "fenced", "held_back"),
    [
        (ours, [True, True], False),
        (ours, [True, False], True),
        (multi_config, [True, True], True),  # nothing is known of the other connector
    ],
)
def test_a_reset_holds_back_no_block_of_steps_in_flight(place, fenced, held_back, monkeypatch):
    engine = PlayedEngine(ranks=2, async_scheduling=True, transfer_config=place)
    scheduler, seen, asked = engine.scheduler, [], []

    def reset_prefix_cache(self: Any, running: bool) -> None:
        all_free = engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
        seen.append((scheduler.defer_block_free, not all_free))
        raise RuntimeError("reset failed")

    wrap(monkeypatch, "reset_prefix_cache", reset_prefix_cache)
    for rank, answer in zip(engine.ranks, fenced, strict=True):
        (connector,) = connectors_in(rank.connector, "offload_worker")
        connector.offload_worker.fence_loads = lambda answer=answer: asked.append(answer) or answer
    engine.add("ends", PROMPT, max_tokens=20)
    engine.schedule_all()
    engine.abort("ends")
    processed = scheduler.processed_step_seq
    with pytest.raises(RuntimeError, match="reset failed"):
        engine.reset()
    assert seen == [(held_back, held_back)]
    assert asked == (fenced if place is ours else [])
    assert (scheduler.defer_block_free, scheduler.processed_step_seq) == (True, processed)
    engine.rest()


def test_a_reset_passes_on_what_it_is_given(monkeypatch):
    def reset_prefix_cache(self: Any, running: bool = False, connector: bool = False) -> Any:
        return running, connector

    wrap(monkeypatch, "reset_prefix_cache", reset_prefix_cache)
    without_plugin: Any = object.__new__(EngineCore)
    without_plugin.scheduler = SimpleNamespace(get_kv_connector=lambda: None)
    for core in (PlayedEngine().core, without_plugin):
        assert core.reset_prefix_cache(True, connector=True) == (True, True)
        assert core.reset_prefix_cache() == (False, False)
