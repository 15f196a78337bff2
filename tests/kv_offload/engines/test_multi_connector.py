"""Inside vLLM's MultiConnector: what reaches ours, and what ours keeps from the other members."""

from __future__ import annotations

import functools
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

import kv_offload.engines.vllm.connector
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.start import log
from kv_offload.engines.vllm.start.ranks import ask_capacities
from kv_offload.errors import UnsupportedError
from tests.support.configurations import around, make_kv_cache_config, make_vllm_config
from tests.support.played_cases import FULL, OTHER, PROMPT, WINDOW, forget, store
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import answer
from tests.support.remote_connector import RemoteConnector, multi_config

ORDERS = pytest.mark.parametrize("first", [True, False], ids=["first", "last"])


def ask(engine: PlayedEngine, request_id: str, prompt: list[int], **params: Any) -> None:
    engine.add(request_id, prompt, extra_args={"kv_transfer_params": params})


@ORDERS
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["one group", "two groups"])
def test_requests_of_many_prefixes(first, role, asynchronous, groups):
    """Requests come, are preempted and aborted while steps are under way; KV is always right."""
    engine = PlayedEngine(
        groups,
        blocks=16,
        async_scheduling=asynchronous,
        transfer_config=functools.partial(multi_config, first=first, role=role),
        max_num_seqs=3,
    )
    assert engine.scheduler.defer_block_free == (asynchronous and role == "kv_both")
    chance = random.Random(f"{first} {role} {asynchronous}")
    prompts = [[*PROMPT[:length], *OTHER[: 20 - length]] for length in (4, 8, 12, 16, 20)]
    alive: list[str] = []
    for turn in range(300):
        if turn % 4 == 0:
            alive.append(f"request {turn}")
            engine.add(alive[-1], chance.choice(prompts), max_tokens=chance.randint(1, 6))
        if chance.random() < 0.1 and alive:
            engine.abort(alive.pop(chance.randrange(len(alive))))
        if len(engine.scheduled) + len(engine.executed) < engine.max_steps_under_way:
            engine.schedule()
        if engine.scheduled and chance.random() < 0.7:
            engine.execute()
        if chance.random() < 0.6:
            engine.run_copies()
        if engine.executed and chance.random() < 0.6:
            engine.process()
        if turn % 50 == 0:
            engine.finish_steps()
            engine.scheduler.reset_prefix_cache()
        engine.check_pins()
    engine.run()
    assert engine.totals["hit_tokens"] > 100
    engine.check_rest()


@ORDERS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_other_member_brings_is_stored(first, asynchronous):
    """Both know the prompt; the first that does loads it. The remote one brings its end, too."""
    engine = PlayedEngine(
        async_scheduling=asynchronous, transfer_config=functools.partial(multi_config, first=first)
    )
    ask(engine, "sends", PROMPT, do_remote_decode=True)
    engine.run()
    forget(engine)
    params = {"do_remote_prefill": True, "remote_id": "sends"}
    ask(engine, "receives", PROMPT, **params)
    engine.run()
    assert engine.totals["hit_tokens"] == (20 if first else 0)
    assert engine.answers["receives"] == engine.answers["sends"] == answer(PROMPT)
    forget(engine)
    engine.offload.manager.reset()
    ask(engine, "receives again", PROMPT, **params)
    engine.run()
    assert engine.totals["hit_tokens"] == 0
    forget(engine)
    engine.add("from host memory", PROMPT)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    assert engine.answers["from host memory"] == engine.answers["sends"]
    engine.check_rest()


def nested_last(plugin: dict[str, Any]) -> dict[str, Any]:
    """Ours is in a MultiConnector of its own, which is behind the other member."""
    config = multi_config(plugin, first=False)
    members = config["kv_connector_extra_config"]["connectors"]
    members[-1] = around(members[-1])
    return config


def disk_of(folder: Path) -> dict[str, Any]:
    return {"disk": {"path": str(folder), "bytes": "1MiB", "keep_on_restart": False}}


def sent(**arguments: Any) -> PlayedEngine:
    """Return an engine of which the other member has a prompt, and host memory nothing."""
    engine = PlayedEngine(**arguments)
    ask(engine, "sends", PROMPT, do_remote_decode=True)
    engine.run()
    forget(engine)
    engine.offload.manager.reset()
    return engine


def with_disk_that_hangs(folder: Path, config: Callable[..., dict[str, Any]]) -> PlayedEngine:
    """Return an engine whose prompt the disk and the other member have, and nobody else."""
    engine = sent(transfer_config=config, plugin=disk_of(folder))
    engine.ranks[0].tier.stuck = True
    return engine


@pytest.mark.parametrize(
    "config", [functools.partial(multi_config, first=False), nested_last], ids=["member", "nested"]
)
def test_what_the_other_member_brings_is_not_read_from_the_disk(tmp_path, config):
    """vLLM takes it from the first member that has it. The request would wait for the disk."""
    engine = with_disk_that_hangs(tmp_path, config)
    ask(engine, "receives", PROMPT, do_remote_prefill=True, remote_id="sends")
    engine.step()
    (request,) = engine.scheduler.requests.values()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.offload.gauges()["promoting_slots"] == 0
    engine.run()
    forget(engine)
    engine.offload.manager.reset()
    engine.add("from the disk", PROMPT)
    engine.step()
    assert engine.offload.gauges()["promoting_slots"] == 5
    engine.ranks[0].tier.stuck = False
    engine.rest()
    engine.connector.shutdown()


def test_a_request_waits_for_the_disk_no_longer_than_the_other_member_takes(tmp_path):
    engine = with_disk_that_hangs(tmp_path, functools.partial(multi_config, first=False))
    request = engine.add("late", PROMPT)
    engine.step(2)
    assert request.status == RequestStatus.WAITING
    assert engine.offload.gauges()["promoting_slots"] == 5
    request.kv_transfer_params = {"do_remote_prefill": True, "remote_id": "sends"}
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.ranks[0].tier.stuck = False
    engine.rest()
    engine.connector.shutdown()


def test_what_the_other_member_brings_is_not_read_ahead(tmp_path):
    """While the engine has it queued it has not asked the other member yet."""
    config = functools.partial(multi_config, first=False)
    engine = sent(transfer_config=config, plugin=disk_of(tmp_path), max_num_seqs=1)
    engine.add("busy", OTHER, 60)
    engine.step(3, copies=True)
    engine.totals.clear()
    ask(engine, "receives", PROMPT, do_remote_prefill=True, remote_id="sends")
    engine.step(3, copies=True)
    assert engine.totals["promoted_slots"] == 0
    engine.add("from the disk", PROMPT)
    engine.step(4, copies=True)
    assert engine.totals["prefetched_slots"] == 5
    engine.abort("busy")
    engine.rest()
    engine.connector.shutdown()


def test_what_was_brought_once_is_looked_up_after_a_preemption():
    """The other member has handed it over, and has nothing more."""
    engine = PlayedEngine(transfer_config=functools.partial(multi_config, first=False))
    ask(engine, "sends", PROMPT, do_remote_decode=True)
    engine.run()
    forget(engine)
    ask(engine, "receives", PROMPT, do_remote_prefill=True, remote_id="sends")
    engine.step(3, copies=True)
    assert engine.scheduler.running
    assert engine.totals["hit_tokens"] == 0
    engine.reset(reset_running_requests=True)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    assert engine.answers["receives"] == answer(PROMPT)
    engine.check_rest()


def test_what_the_other_member_failed_to_load_is_not_kept():
    """The forward has read it, and its blocks were planned to be stored in the same step."""
    config = functools.partial(multi_config, remote={"synchronous": True})
    plugin = {"on_load_failure": "fail"}
    engine = sent(max_num_batched_tokens=64, transfer_config=config, plugin=plugin)
    (remote,) = [c for c in engine.ranks[0].connector._connectors if isinstance(c, RemoteConnector)]
    remote.failing = True
    engine.model.may_lose_kv = True
    ask(engine, "receives", PROMPT, do_remote_prefill=True, remote_id="sends")
    engine.step()
    assert engine.offload.in_flight.pinned_blocks
    assert engine.ended["receives"] == "error"
    engine.rest()
    assert engine.offload.manager.readable_slots() == {}


@pytest.mark.parametrize("then", ["waits", "runs", "aborted", "gone"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_other_member_says_of_a_load_of_ours(asynchronous, then):
    """It says that it has received what ours loads, or has loaded."""
    engine = PlayedEngine(
        async_scheduling=asynchronous,
        transfer_config=multi_config,
        synchronous_loads=then == "runs",
        max_num_batched_tokens=64,
    )
    ask(engine, "sends", PROMPT, do_remote_decode=True)
    engine.run()
    forget(engine)
    (remote,) = [c for c in engine.ranks[0].connector._connectors if isinstance(c, RemoteConnector)]
    ask(engine, "receives", PROMPT, do_remote_prefill=True, remote_id="sends")
    engine.step()
    (request,) = engine.scheduler.requests.values()
    running = RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.status == running[then != "runs"]
    if then in ("aborted", "gone"):
        engine.abort("receives")
    if then == "gone":
        engine.run()
        engine.add("another", OTHER)
    remote.unreachable = True
    engine.step(2)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
        assert engine.answers["receives"] == answer(PROMPT)
    engine.check_rest()


@ORDERS
def test_a_load_of_ours_that_fails_costs_no_request(first):
    """vLLM's own `kv_load_failure_policy`, by default to fail, is for loads of other connectors."""
    engine = PlayedEngine(transfer_config=functools.partial(multi_config, first=first))
    store(engine, PROMPT)
    engine.add("fails", PROMPT)
    engine.step()
    engine.run_copies(fail=True)
    engine.run()
    assert engine.totals["failed_loads"] == 1
    assert engine.answers["fails"] == answer(PROMPT)
    engine.check_rest()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_asked_what_they_hold(ranks):
    engine = PlayedEngine(ranks=ranks, slots=24, transfer_config=multi_config)
    assert engine.offload.manager.usable_slots == 24
    (remote,) = [c for c in engine.connector._connectors if isinstance(c, RemoteConnector)]
    assert len(remote.handshake) == ranks
    store(engine, PROMPT)
    assert engine.offload.manager.slots_in_use > 0


def test_ranks_that_nobody_can_ask():
    with pytest.raises(UnsupportedError, match="use KVOffloadConnector without these"):
        ask_capacities()


def build(transfer_config: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    config = make_vllm_config({}, transfer_config=transfer_config)
    config.cache_config.block_size = 4
    KVConnectorFactory.create_connector(
        config, KVConnectorRole.SCHEDULER, make_kv_cache_config((FULL,), 40)
    )
    return config.kv_transfer_config


def nested(plugin: dict[str, Any]) -> dict[str, Any]:
    return around(multi_config(plugin))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(log.logger, "warning", lambda text, *args: messages.append(text % args))
    return messages


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "option", [{"cpu_bytes": "32MiB"}, {"store_blocks": "prompt"}, {"config_file": "/kv.yaml"}]
)
def test_an_option_of_ours_beside_the_members_is_refused(deep, option):
    """The member has another `cpu_bytes`, and none of the others."""

    def misplaced(plugin: dict[str, Any]) -> dict[str, Any]:
        config = multi_config(plugin)
        config = around(config) if deep else config
        config["kv_connector_extra_config"] |= option
        return config

    ((name, value),) = option.items()
    with pytest.raises(UnsupportedError) as caught:
        build(misplaced)
    assert str(caught.value).endswith(
        f"{name}: {value!r} is next to connectors in the kv_connector_extra_config of the "
        "MultiConnector, where no member reads it: move it into the kv_connector_extra_config of "
        "the member KVOffloadConnector"
    )


def test_options_of_others_beside_the_members_are_left_alone(warned):
    """`eviction_policy` may be meant for another member, which does not get it either."""

    def outside(plugin: dict[str, Any]) -> dict[str, Any]:
        config = multi_config({**plugin, "cpu_bytes": "64MiB"}, kv_load_failure_policy="recompute")
        config["kv_connector_extra_config"] |= {
            "cpu_bytes": "64MiB",
            "cpu_bytes_to_use": 1 << 30,
            "eviction_policy": "lru",
        }
        return config

    build(outside)
    (message,) = warned
    assert message.startswith("kv-offload: eviction_policy: 'lru' is next to connectors in the ")


@pytest.mark.parametrize("deep", [False, True])
def test_ours_twice_is_refused(deep):
    def twice(plugin: dict[str, Any]) -> dict[str, Any]:
        config = multi_config(plugin)
        members = config["kv_connector_extra_config"]["connectors"]
        members.append(multi_config(plugin) if deep else members[0])
        return config

    with pytest.raises(UnsupportedError, match=f"has 2 members {CONNECTOR}, which would keep"):
        build(twice)


def test_a_member_given_by_the_path_of_its_module_is_found_by_name(monkeypatch):
    """The MultiConnector rebuilds its stats by that name; the entry point may not be installed."""
    names = {n: cls for n, cls in KVConnectorFactory._registry.items() if n != CONNECTOR}
    monkeypatch.setattr(KVConnectorFactory, "_registry", names)
    runpy.run_path(kv_offload.engines.vllm.connector.__file__)
    assert CONNECTOR in names
