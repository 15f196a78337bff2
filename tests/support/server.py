"""An OpenAI-compatible server with the plugin, on loopback, and a client's requests to it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.inputs import BLOCK_BYTES, BLOCK_TOKENS, random_tokens, transfer_config
from tests.support.mooncake import HeldPort
from tests.support.processes import Process, kill_group, start_module
from tests.support.small_models import write_model

START_SECONDS = 480
FOR_TRIALS = {"VLLM_SERVER_DEV_MODE": "1"}
"""Adds POST /reset_prefix_cache."""
PROMPT_TOKENS = 300


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    words: Sequence[str] = (),
    environment: Mapping[str, str] = FOR_TRIALS,
    **plugin: Any,
) -> Iterator[str]:
    """Start a server whose files are in `folder`; yield its base URL.

    `words` are more command-line arguments.
    """
    log = folder / "server.log"
    log.touch()
    port = HeldPort()
    process = start_module(
        "vllm.entrypoints.openai.api_server",
        *("--model", str(write_model("qwen3", folder / "qwen3"))),
        *("--host", "127.0.0.1", "--port", str(port.number), "--served-model-name", "small"),
        *("--enforce-eager", "--dtype", "float32", "--enable-prompt-tokens-details"),
        *("--block-size", str(BLOCK_TOKENS), "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", str(16 << 20)),
        *("--kv-transfer-config", json.dumps(transfer_config(plugin))),
        *words,
        stdout=log,
        stderr=log,
        forks=True,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_LOGGING_LEVEL="INFO",
        **environment,
    )
    url = f"http://127.0.0.1:{port.number}"
    try:
        wait_for_answer(url + "/health", process, log)
        yield url
    finally:
        end(process)


def wait_for_answer(url: str, process: Process, log: Path) -> None:
    """Wait until a program answers; if it ends or is too slow, show its log."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            get(url)
        except OSError:
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.2)
        else:
            return


def end(process: Process) -> None:
    """Stop a server that leads a process group, and its engine."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    kill_group(process)


def get(
    url: str,
    body: dict[str, Any] | None = None,
    key: str | None = None,
    more_headers: Mapping[str, str] = {},
) -> str:
    """Get a page, or post `body`, with the server's key if given; return the answer."""
    headers = {"Content-Type": "application/json", **more_headers}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        url, data=None if body is None else json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request, timeout=300) as response:
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


def wait_for(url: str, name: str, value: float) -> None:
    """Wait until a metric has at least this value, or is 0 if the value is 0."""
    deadline = time.monotonic() + 300
    while (found := metric(url, name)) < value or (value == 0 and found):
        assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
        time.sleep(0.2)


def ask(
    url: str,
    seed: int,
    key: str | None = None,
    headers: Mapping[str, str] = {},
    **more: Any,
) -> dict[str, Any]:
    """Return the whole answer to a prompt of random tokens; `more` is added to the request."""
    body = {
        "model": "small",
        "prompt": text(seed),
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    answer: dict[str, Any] = json.loads(get(url + "/v1/completions", body, key, headers))
    return answer


def text(seed: int, tokens: int = PROMPT_TOKENS) -> str:
    """Return a prompt of random tokens, as the small model's tokenizer reads them."""
    return " ".join(f"t{token}" for token in random_tokens(tokens, seed=seed))


def hit(url: str, seed: int) -> tuple[str, str]:
    """Have a prompt stored, dropped by vLLM and loaded; return its answers before and after."""
    stored = metric(url, "vllm:host_kv_cache_stored_bytes_total")
    first = ask(url, seed)["choices"][0]["text"]
    # The engine is idle now, but must still have reported its stores.
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    wait_for(url, "vllm:host_kv_cache_stored_bytes_total", stored + blocks * BLOCK_BYTES)
    get(url + "/reset_prefix_cache", {})
    return first, ask(url, seed)["choices"][0]["text"]
