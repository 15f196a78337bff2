"""`kv-offload warm-up` with a server that is slow, breaks off or refuses, and with odd files."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kv_offload.tools.conftest import Command
from tests.kv_offload.tools.status.server import HITS, PageHandler, PageServer
from tests.support.commands import Terminal

ENDS_SECONDS = 30
"""After Ctrl-C at the latest: Python has to end. The server keeps answers back for as long as it
runs."""


class Server(PageServer):
    """Answers as vLLM does, and keeps the bodies that it was sent."""

    block_on_close = False

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.bodies: list[dict[str, Any]] = []
        self.may_answer = threading.Event()
        self.breaks_off = False
        self.refusal = ""

    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that has gone."""


class _Handler(PageHandler):
    server: Server

    def do_GET(self) -> None:  # noqa: N802
        if self.path != "/metrics":
            self.answer('{"data": [{"id": "small"}]}')
        elif self.server.refusal and self.server.bodies:
            self.answer("gone", 503)
        else:
            self.answer(HITS)

    def do_POST(self) -> None:  # noqa: N802
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.breaks_off:
            self.send_response(500)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        elif self.server.refusal:
            self.answer(self.server.refusal, 400)
        else:
            self.server.may_answer.wait()
            self.answer('{"usage": {"prompt_tokens": 3}}')


@pytest.fixture
def server() -> Iterator[Server]:
    with Server().running() as server:
        server.may_answer.set()
        yield server
        server.may_answer.set()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def warm_up(server: Server, file: Path, command: Command) -> Command:
    def run(*lines: str, end: str = "\n") -> Any:
        file.write_text(end.join(lines), encoding="utf-8", newline="")
        return command("warm-up", server.address, file, "--at-once", "1")

    return run


def test_only_a_line_feed_ends_a_line(server: Server, warm_up: Command) -> None:
    """JSON may have what Python's `splitlines` takes for the end of a line."""
    prompts = ["a\u2028b", "a\u2029b", "a\u0085b"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    assert warm_up(*lines, end="\r\n").status == 0
    assert [body["prompt"] for body in server.bodies] == prompts


def test_a_line_that_is_nested_too_deeply(server: Server, file: Path, warm_up: Command) -> None:
    done = warm_up('{"prompt": "a"}', "[" * 100_000)
    assert done.status == 2
    assert done.err.startswith(f"kv-offload: {file}, line 2: no JSON: ")
    assert server.bodies == []


def test_a_server_that_breaks_off_is_an_error_of_the_line(
    server: Server, file: Path, warm_up: Command
) -> None:
    server.breaks_off = True
    done = warm_up('{"prompt": "a"}', '{"prompt": "b"}', "")
    assert done.status == 1
    assert done.out.startswith("0 of 2 prompts with 0 tokens in ")
    for line in (1, 2):
        assert f"{file}, line {line}: HTTP status 500" in done.err


def test_what_was_refused_is_told_though_the_servers_figures_cannot_be_read(
    server: Server, file: Path, warm_up: Command
) -> None:
    """And what the server says of it cannot steer a terminal."""
    server.refusal = "\x1b]0;owned\x07 no\nsecond line"
    done = warm_up('{"prompt": "a"}')
    assert done.status == 2
    assert done.out.startswith("0 of 1 prompts with 0 tokens in ")
    refused, why, *_ = done.err.splitlines()
    assert refused == f"{file}, line 1: HTTP status 400: ?]0;owned? no second line"
    assert "HTTP status 503" in why


def test_recorded_requests_are_sent_for_one_token(server: Server, warm_up: Command) -> None:
    recorded = {
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 40,
        "n": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "tenant",
    }
    assert warm_up(json.dumps({"prompt": "a", **recorded})).status == 0
    sent = {"model": "small", "prompt": "a", "max_tokens": 1, "stream": False}
    assert server.bodies == [{**sent, "cache_salt": "tenant"}]


@pytest.mark.parametrize("end", ["\n", "\u20ac"])
def test_a_key_that_cannot_be_sent_is_not_shown(
    end: str, server: Server, warm_up: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that was written into a file with an editor ends with a line feed."""
    monkeypatch.setenv("VLLM_API_KEY", f"secret{end}")
    done = warm_up('{"prompt": "a"}')
    assert done.status == 2
    assert done.err.startswith("kv-offload: environment: VLLM_API_KEY: character 7 ")
    assert "secret" not in done.err
    assert server.bodies == []


def test_ctrl_c_does_not_wait_for_answers(server: Server, file: Path) -> None:
    server.may_answer.clear()
    file.write_text("\n".join(json.dumps({"prompt": f"p{n}"}) for n in range(20)))
    command = [sys.executable, "-m", "kv_offload.tools", "warm-up", server.address, str(file)]
    with Terminal(command, PYTHONPATH=":".join(sys.path)) as terminal:
        deadline = time.monotonic() + 100
        while len(server.bodies) < 8:
            assert time.monotonic() < deadline, terminal.output
            time.sleep(0.05)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(ENDS_SECONDS) == 128 + signal.SIGINT
    assert len(server.bodies) == 8
    assert "Traceback" not in terminal.output
