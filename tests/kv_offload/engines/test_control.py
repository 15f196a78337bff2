"""The routes of operators on vLLM's own application, without an engine."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from kv_offload.engines.vllm.actions import PAUSE_STORES, act
from kv_offload.engines.vllm.control import PREFIX, ControlRoutes
from kv_offload.errors import UnsupportedError

try:
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX
except ImportError:  # before 0.32
    from vllm.entrypoints.serve.utils.server_utils import GUARDED_PREFIX

PATHS = [f"{PREFIX}/{name}" for name in ("empty", "pause-stores", "resume-stores")]


class Engine:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def reset_prefix_cache(self, *, reset_connector: bool) -> bool:
        self.asked.append(reset_connector)
        return False

    async def collective_rpc(self, method: str) -> list[str]:
        self.asked.append(method)
        return ["as the engine says"]


def serve(engine: Engine | None, api_key: list[str] | None) -> TestClient:
    plugin, app = ControlRoutes(), FastAPI()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, Namespace(api_key=api_key)))
    return TestClient(app)


def test_the_routes_lie_where_vllm_asks_for_its_key():
    assert PREFIX.startswith(GUARDED_PREFIX)


@pytest.mark.parametrize("api_key", [None, [], [""]])
def test_without_a_key_of_the_server_the_routes_are_off(api_key, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    engine = Engine()
    client = serve(engine, api_key)
    for path in PATHS:
        answer = client.post(path)
        assert answer.status_code == 403
        assert "start it with --api-key" in answer.json()["detail"]
    assert engine.asked == []


def test_a_server_without_an_engine_has_nothing_to_act_on():
    assert [serve(None, ["key"]).post(path).status_code for path in PATHS] == [403] * 3


def test_with_a_key_from_either_place_the_routes_act(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    engine = Engine()
    client = serve(engine, None)
    answers = [client.post(path).json() for path in PATHS]
    assert answers == [
        {"host_memory": "empty", "engine_cache": "in use"},
        {"stores": "as the engine says"},
        {"stores": "as the engine says"},
    ]
    assert engine.asked == [True, "kv_offload.pause_stores", "kv_offload.resume_stores"]
    assert client.get(PATHS[0]).status_code == 405


def test_an_engine_without_the_connector_says_so():
    core = SimpleNamespace(scheduler=SimpleNamespace(get_kv_connector=lambda: None))
    with pytest.raises(UnsupportedError, match="this engine has no KVOffloadConnector"):
        act(core, PAUSE_STORES)
