"""What sleep, weight updates and resets leave in host memory, under vLLM's own engine core."""

from __future__ import annotations

import inspect
from collections import ChainMap
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.distributed import kv_transfer
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from kv_offload.config import OffloadConfig
from kv_offload.engines.vllm.patches import install_for_scheduler
from kv_offload.engines.vllm.start.support import check_keep_on_sleep
from kv_offload.engines.vllm.versions import vllm_version
from kv_offload.errors import UnsupportedError
from tests.support.played_cases import OTHER, PROMPT, forget, narrow
from tests.support.played_engine import PlayedEngine


class OwnProcess(EngineCoreProc):
    """A pause with requests under way ends when the engine is idle."""

    def _send_abort_outputs(self, requests: Any) -> None:
        """Nobody waits for outputs here."""

    def run_until_idle(self) -> None:
        self.engine.run()
        self._notify_idle_state_callbacks()


def make(kind: type, *, keep: bool, **arguments: Any) -> Any:
    """Return a core whose host memory holds five blocks, and whose own cache does as well.

    The played engine has no engine core on its stack, so that check at start is left out. Calls
    change no weight: KV that should be gone is right, so that it can be served.
    """
    with mock.patch("kv_offload.engines.vllm.start.support.check_keep_on_sleep"):
        engine = PlayedEngine(plugin={"keep_on_sleep": keep}, **arguments)
    engine.change_weights = lambda: None  # type: ignore[method-assign]
    core: Any = object.__new__(kind)
    vars(core).update(vars(engine.core), engine=engine)
    sleep = core.model_executor.sleep
    core.model_executor.sleep = mock.create_autospec(sleep, side_effect=sleep)
    core._idle_state_callbacks, core.batch_queue, core.engines_running = [], None, False
    engine.serve("stored", PROMPT, 1)
    assert slots(core) == 5
    return core


def make_running() -> Any:
    core = make(OwnProcess, keep=True)
    core.engine.add("running", OTHER)
    core.engine.step()
    return core


def slots(core: Any) -> int:
    return int(core.engine.offload.manager.slots_in_use)


KINDS = pytest.mark.parametrize("kind", [EngineCore, OwnProcess])


@KINDS
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_host_memory_outlives_a_sleep_of_level_1_where_the_user_says_so(kind, keep, level):
    core = make(kind, keep=keep)
    assert core.sleep(level=level) is None
    core.model_executor.sleep.assert_called_once_with(level)
    assert slots(core) == (5 if keep and level == 1 else 0)
    core.resume_scheduler()
    core.engine.serve("again", PROMPT)
    assert core.engine.totals["hit_tokens"] == (20 if keep and level == 1 else 0)
    core.engine.check_rest()


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_sleep_that_waits_for_requests_keeps_host_memory_too(mode):
    core = make_running()
    future = core.sleep(1, mode)
    assert isinstance(future, Future)
    assert not core.model_executor.sleep.called
    core.run_until_idle()
    assert future.result(0) is None
    core.model_executor.sleep.assert_called_once_with(1)
    assert slots(core) >= 5


@pytest.mark.parametrize("other", ["sleep", "reset", "pause", "pause before"])
def test_only_the_reset_of_the_sleep_itself_spares_host_memory(other):
    """Somebody else's reset may come while a sleep waits for requests."""
    core = make_running()
    if other == "pause before":
        core.pause_scheduler("wait", clear_cache=True)
    core.sleep(1, "wait")
    if other == "sleep":
        core.sleep(2, "wait")
    elif other == "pause":
        core.pause_scheduler("wait", clear_cache=True)
    elif other == "reset":
        core.engine.run()
        assert core.reset_prefix_cache(False, True)
    core.run_until_idle()
    assert slots(core) == 0


CHANGES: list[Any] = [
    *("reload_weights", "start_draft_weight_update", "reset_weights", "load_model"),
    *("update_config", "update_named_param", "apply_model", "sleep", "my_extension"),
    *(print, lambda worker: worker),
]
KEEPS = [
    *("checkpoint_prepare", "compute_weight_checksums", "get_encoder_timing_stats"),
    *("get_model_inspection", "init_weight_transfer_engine", "update_max_model_len"),
    "release_late_interaction_query_cache",
]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("method", [*CHANGES, *KEEPS])
def test_calls_that_may_change_weights_empty_host_memory(keep, method):
    core = make(EngineCore, keep=keep)
    called: list[Any] = []
    core.model_executor.collective_rpc = lambda *arguments, **_: called.append(arguments) or []
    core.collective_rpc(method, None, (), None)
    assert called == [(method, None, (), None)]
    assert slots(core) == (5 if method in KEEPS else 0)
    core.engine.check_host_memory()
    assert core.reset_prefix_cache()
    assert slots(core) == (5 if method in KEEPS else 0)


@KINDS
def test_a_weight_update_in_sleep_empties_what_was_kept(kind):
    core = make(kind, keep=True)
    core.sleep(level=1)
    assert slots(core) == 5
    core.collective_rpc("reload_weights")
    assert slots(core) == 0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("how", ["update_named_param", "by itself"])
def test_what_the_old_cache_served_after_a_weight_update_goes_with_it(keep, how):
    """The engine's own cache still has the old blocks; whoever hits them has them stored."""
    core = make(EngineCore, keep=keep)
    if how == "by itself":
        core.engine.ranks[0].get_model().load_weights([])
        core.engine.step()
    else:
        core.collective_rpc(how)
    assert slots(core) == 0
    core.engine.add("hits, and lets a reset fail", PROMPT)
    core.engine.step()
    assert not core.reset_prefix_cache()
    core.engine.run()
    assert slots(core) >= 5
    if keep:
        core.sleep(level=1)
    else:
        assert core.reset_prefix_cache()
    assert slots(core) == 0
    core.resume_scheduler()
    core.engine.serve("new", PROMPT, 1)
    assert core.reset_prefix_cache()
    assert slots(core) == 5


@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_weight_update_lets_no_store_that_runs_or_waits_become_readable(is_narrow):
    core = make(EngineCore, keep=True)
    if is_narrow:
        narrow(core.engine, 1)
    core.engine.add("more", OTHER, max_tokens=1)
    core.engine.step(2)
    assert core.engine.offload.in_flight.pinned_blocks
    assert (core.engine.offload.gauges()["waiting_slots"] > 0) is is_narrow
    core.collective_rpc("update_weights")
    core.engine.run()
    assert core.engine.offload.manager.readable_slots() == {}
    assert core.reset_prefix_cache()
    core.engine.check_rest()


def watch() -> None:
    config = OffloadConfig(cpu_bytes=1, keep_on_sleep=True)
    install_for_scheduler(vllm_version(), config)


def test_a_core_that_is_being_built_may_call_its_workers():
    """Before it has a scheduler, where another engine of the process is watched already."""
    watch()
    core = object.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=lambda *arguments: [arguments[0]])
    assert core.collective_rpc("update_max_model_len") == ["update_max_model_len"]
    assert core.collective_rpc(print) == [print]


def test_ranks_that_tell_again_what_they_hold_change_nothing(monkeypatch):
    """From vLLM 0.33 the engine core asks them whenever it wakes up, as it does at the start."""
    core = make(EngineCore, keep=False)
    logged: list[Any] = []
    monkeypatch.setattr(
        "kv_offload.engines.vllm.hooks.scheduler.log_pool", lambda *what: logged.append(what)
    )
    told = core.engine.model_executor.get_kv_connector_handshake_metadata()
    core.engine.connector.set_xfer_handshake_metadata_pp_aware(dict(ChainMap(*told)))
    assert slots(core) == 5
    assert not logged, "the log of the start says it"


def give_weights(core: Any, rank: int = 0) -> None:
    core.engine.ranks[rank].get_model().load_weights([("a", 1)])


@pytest.mark.parametrize("own", [True, False])
def test_of_several_engines_in_a_process_each_asks_its_own_rank(monkeypatch, own):
    core, other = make(EngineCore, keep=False), make(EngineCore, keep=False)
    rank = (core if own else other).engine.ranks[0]
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: rank.connector)
    forget(core.engine)
    rank.get_model().load_weights([])
    core.engine.serve("again", PROMPT)
    assert core.engine.totals["hit_tokens"] == (0 if own else 20)
    core.engine.check_rest()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reports_that_its_model_was_given_weights(rank):
    core = make(EngineCore, keep=False, ranks=2)
    give_weights(core, rank)
    assert slots(core) == 5
    core.engine.step()
    assert slots(core) == 0
    core.engine.serve("hits", PROMPT, 1)
    assert slots(core) == 5, "the engine's own cache was not reset"
    assert core.reset_prefix_cache()
    assert slots(core) == 0
    core.engine.check_rest()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reset_counts_that_came_before_the_report(ranks):
    """And the report that comes later does not empty what was stored since."""
    core = make(EngineCore, keep=False, ranks=ranks)
    give_weights(core, ranks - 1)
    assert core.reset_prefix_cache()
    assert slots(core) == 0
    for _ in range(2):
        core.engine.serve("new", PROMPT, 1)
        assert slots(core) == 5
        assert core.reset_prefix_cache()
        assert slots(core) == 5
    give_weights(core)
    assert core.reset_prefix_cache()
    assert slots(core) == 0
    core.engine.check_rest()


def test_a_report_under_way_during_a_reset_is_not_heard_twice():
    core = make(EngineCore, keep=False, async_scheduling=True)
    engine = core.engine
    give_weights(core)
    engine.add("new", OTHER, max_tokens=1)
    engine.schedule()
    engine.execute()  # its report has the news
    assert core.reset_prefix_cache(reset_running_requests=True)
    assert slots(core) == 0
    assert core.reset_prefix_cache()  # the first after new weights empties host memory once more
    engine.run()
    engine.serve("stored", PROMPT, 1)
    assert slots(core) > 0
    assert core.reset_prefix_cache()
    assert slots(core) > 0
    engine.check_rest()


def test_the_watched_methods_keep_their_signatures():
    """vLLM converts what comes from its front end by them."""
    watch()
    assert "level" in inspect.signature(EngineCore.sleep).parameters
    assert "method" in inspect.signature(EngineCore.collective_rpc).parameters


def build(self: Any) -> None:
    """Stand for the method in which an engine core builds its scheduler."""
    check_keep_on_sleep()


def test_keeping_is_refused_where_the_user_can_reach_the_model():
    with pytest.raises(UnsupportedError, match="set VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        build(object.__new__(EngineCore))
    with pytest.raises(UnsupportedError, match="in the process of its user"):
        PlayedEngine(plugin={"keep_on_sleep": True})
    build(object.__new__(EngineCoreProc))
