"""An OpenAI-compatible server with the plugin, as the README starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import random_tokens, transfer_config
from tests.support.small_models import write_model

START_SECONDS = 240


@pytest.fixture
def server(model_folder: Path, tmp_path: Path) -> Iterator[str]:
    """Start a server on loopback; yield its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(write_model("qwen3", model_folder / "qwen3"))),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"),
        *("--enforce-eager", "--dtype", "float32"),
        *("--block-size", "32", "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", str(16 << 20)),
        *("--kv-transfer-config", json.dumps(transfer_config({}))),
    ]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # adds POST /reset_prefix_cache
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                get(url + "/health")
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < deadline, log.read_text()[-6000:]
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def get(url: str, body: dict[str, Any] | None = None) -> str:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(response.read().decode())


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in get(url + "/metrics").splitlines()
        if line.split("{")[0] == name
    ]
    assert values, f"no metric {name}"
    return sum(values)


def test_a_prompt_is_served_again_from_host_memory(server: str) -> None:
    body = {
        "model": "small",
        "prompt": " ".join(f"t{token}" for token in random_tokens(300, seed=9)),
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }

    def complete() -> str:
        return str(json.loads(get(server + "/v1/completions", body))["choices"][0]["text"])

    first = complete()
    assert len(first.split()) >= 8  # special tokens have no text
    # The engine idles now; it must still have reported its stores.
    deadline = time.monotonic() + 20
    while metric(server, "vllm:host_kv_cache_stored_bytes_total") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert metric(server, "vllm:host_kv_cache_loaded_bytes_total") == 0
    get(server + "/reset_prefix_cache", {})
    assert complete() == first
    assert metric(server, "vllm:external_prefix_cache_hits_total") == 9 * 32
    assert metric(server, "vllm:host_kv_cache_hit_tokens_total") == 9 * 32
    assert metric(server, "vllm:host_kv_cache_loaded_bytes_total") == 9 * 32768
    assert metric(server, "vllm:host_kv_cache_lookup_tokens_total") >= 9 * 32
    assert metric(server, "vllm:host_kv_cache_slots_in_use") >= 9
