"""A server for users that requires a key; operators empty host memory and pause stores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.metrics import PREFIX
from tests.support.processes import ROOT
from tests.support.server import ask, get, metric, serving, text, wait_for

KEY = "a key of this test"
CONTROL = "/v1/kv-offload"
BLOCKS = 9
"""Full blocks of a prompt."""


def write_entry_points(folder: Path) -> Path:
    """Write package metadata that `importlib.metadata` reads into a folder; return the folder.

    On Python's path it takes precedence over an older installation.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"kv_offload-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("control")
    path = [write_entry_points(folder / "installed"), ROOT, ROOT / "transfer"]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VLLM_PLUGINS": "kv_offload,kv_offload_control",
    }
    words = ("--api-key", KEY, "--trust-request-chat-template")
    with serving(folder, words=words, environment=environment) as url:
        yield url


def chat(*text_of: int) -> dict[str, Any]:
    """Return the body of a request with one message whose text is the prompt; see `text`."""
    return {
        "messages": [{"role": "user", "content": text(*text_of)}],
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def act(server: str, name: str) -> dict[str, str]:
    answer: dict[str, str] = json.loads(get(f"{server}{CONTROL}/{name}", {}, KEY))
    return answer


def cached(answer: dict[str, Any]) -> int:
    """Return how many of the prompt's tokens were in either cache."""
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details else 0


def refused(server: str, path: str, key: str | None = None, **body: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server + path, body, key)
    with caught.value as error:
        return error.code, error.read().decode()


def test_without_the_key_nothing_is_done(server):
    for name in ("empty", "pause-stores", "resume-stores"):
        for key in (None, "another key"):
            assert refused(server, f"{CONTROL}/{name}", key)[0] == 401
    assert metric(server, f"{PREFIX}stores_paused") == 0


def test_what_was_emptied_is_computed(server):
    ask(server, seed=1, key=KEY)
    wait_for(server, f"{PREFIX}stored_slots_total", BLOCKS)
    assert cached(ask(server, seed=1, key=KEY)) == 288
    assert act(server, "empty") == {"host_memory": "empty", "engine_cache": "empty"}
    wait_for(server, f"{PREFIX}slots_in_use", 0)
    assert cached(ask(server, seed=1, key=KEY)) == 0


def test_nothing_is_stored_in_a_pause(server):
    act(server, "empty")
    assert act(server, "pause-stores") == {"stores": "paused"}
    wait_for(server, f"{PREFIX}stores_paused", 1)
    ask(server, seed=2, key=KEY)
    wait_for(server, f"{PREFIX}skipped_paused_total", BLOCKS)
    assert metric(server, f"{PREFIX}slots_in_use") == 0
    assert act(server, "resume-stores") == {"stores": "running"}
    ask(server, seed=2, key=KEY)
    wait_for(server, f"{PREFIX}slots_in_use", BLOCKS)


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"retain_seconds": -5}, "retain_seconds: -5 is not allowed. Give a number above 0"),
        ({"stored": True}, "kv_transfer_params.kv_offload.stored: unknown key. Remove it"),
    ],
)
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_wrong_hints_are_refused_for_that_request_alone(server, hints, message, endpoint):
    body = chat(3, 30) if endpoint == "chat/completions" else {"prompt": text(3)}
    params = {"kv_transfer_params": {"kv_offload": hints, "remote_host": "of another connector"}}
    code, answer = refused(server, f"/v1/{endpoint}", KEY, model="small", **body, **params)
    assert code == 400
    assert message in answer
    assert ask(server, seed=3, key=KEY, kv_transfer_params={"remote_host": "x"})["choices"]


def test_nested_parameters_end_one_request_and_no_engine(server):
    params: Any = 1
    for _ in range(500):
        params = {"a": params}
    for depth in (500, 50):
        for _ in range(500 - depth):
            params = params["a"]
        code, answer = refused(
            server, "/v1/completions", KEY, model="small", prompt=text(3), kv_transfer_params=params
        )
        assert code == 400
        assert "nested more than 32 levels deep" in answer
    assert ask(server, seed=3, key=KEY)["choices"]


def test_a_client_says_what_is_stored_and_retained(server):
    act(server, "empty")
    params = {"kv_transfer_params": {"kv_offload": {"store": False}}}
    ask(server, seed=4, key=KEY, **params)
    assert metric(server, f"{PREFIX}slots_in_use") == 0
    params = {"kv_transfer_params": {"kv_offload": {"retain_seconds": 600}}}
    ask(server, seed=5, key=KEY, **params)
    wait_for(server, f"{PREFIX}retained_slots", BLOCKS)
    act(server, "empty")
    wait_for(server, f"{PREFIX}retained_slots", 0)


def test_the_documented_loop_warms_a_server_up(server, tmp_path):
    act(server, "empty")
    page = (ROOT / "docs/use/requests.md").read_text()
    loop, example = re.findall(
        r"^```(?:sh|json)\n(.*?)^```$", page.partition("## Warm a server up")[2], re.M | re.S
    )
    request = json.loads(example)
    prompts = [
        {**request, "model": "small", "prompt": text(11)},
        {**request, "model": "small", "prompt": text(12), "cache_salt": "tenant"},
        {**request, "model": "small", "prompt": text(11, 2000)},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
    done = subprocess.run(
        ["sh", "-c", loop.replace("localhost:8000", server)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "VLLM_API_KEY": KEY},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["200", "200", "400"], done.stderr
    wait_for(server, f"{PREFIX}retained_slots", 2 * BLOCKS)
    assert cached(ask(server, seed=11, key=KEY)) == 288
    assert cached(ask(server, seed=12, key=KEY, cache_salt="tenant")) == 288
