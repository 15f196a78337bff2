"""`kv-offload warm-up` with a server that is slow, breaks off or refuses, and with odd files."""

from __future__ import annotations

import http.server
import json
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.tools.main import main
from tests.kv_offload.tools.status.server import HITS
from tests.support.commands import Terminal

ENDS_SECONDS = 30
"""After Ctrl-C at the latest: Python has to end. The server keeps answers back for as long as it
runs."""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers as vLLM does, and keeps the bodies that it was sent."""

    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.may_answer = threading.Event()
        self.breaks_off = False
        self.refusal = ""
        self.has_metrics = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that has gone."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/metrics" and not self.server.has_metrics:
            self._answer("gone", 503)
        else:
            self._answer(HITS if self.path == "/metrics" else '{"data": [{"id": "small"}]}')

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.breaks_off:
            self.send_response(500)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            return
        if self.server.refusal:
            self.server.has_metrics = False
            self._answer(self.server.refusal, 400)
            return
        self.server.may_answer.wait()
        self._answer('{"usage": {"prompt_tokens": 3}}')

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            server.may_answer.set()
            yield server
        finally:
            server.may_answer.set()
            server.shutdown()
            thread.join()


def test_only_a_line_feed_ends_a_line(server: Server, tmp_path: Path) -> None:
    """JSON may have what Python's `splitlines` takes for the end of a line."""
    prompts = ["a\u2028b", "a\u2029b", "a\u0085b"]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    file.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert main(["warm-up", server.address, str(file), "--at-once", "1"]) == 0
    assert [body["prompt"] for body in server.bodies] == prompts


def test_a_line_that_is_nested_too_deeply(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + "[" * 100_000)
    assert main(["warm-up", server.address, str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"kv-offload: {file}, line 2: no JSON: ")
    assert server.bodies == []


def test_a_server_that_breaks_off_is_an_error_of_the_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.breaks_off = True
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert main(["warm-up", server.address, str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("0 of 2 prompts with 0 tokens in ")
    for line in (1, 2):
        assert f"{file}, line {line}: HTTP status 500" in printed.err


def test_what_was_refused_is_told_though_the_servers_figures_cannot_be_read(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the server says of it cannot steer a terminal."""
    server.refusal = "\x1b]0;owned\x07 no\nsecond line"
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert main(["warm-up", server.address, str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("0 of 1 prompts with 0 tokens in ")
    refused, why, *_ = printed.err.splitlines()
    assert refused == f"{file}, line 1: HTTP status 400: ?]0;owned? no second line"
    assert "HTTP status 503" in why


def test_recorded_requests_are_sent_for_one_token(server: Server, tmp_path: Path) -> None:
    recorded = {
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 40,
        "n": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "tenant",
    }
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", **recorded}))
    assert main(["warm-up", server.address, str(file)]) == 0
    sent = {"model": "small", "prompt": "a", "max_tokens": 1, "stream": False}
    assert server.bodies == [{**sent, "cache_salt": "tenant"}]


@pytest.mark.parametrize("end", ["\n", "\u20ac"])
def test_a_key_that_cannot_be_sent_is_not_shown(
    end: str,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A secret that was written into a file with an editor ends with a line feed."""
    monkeypatch.setenv("VLLM_API_KEY", f"secret{end}")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}')
    assert main(["warm-up", server.address, str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("kv-offload: environment: VLLM_API_KEY: character 7 ")
    assert "secret" not in message
    assert server.bodies == []


def test_ctrl_c_does_not_wait_for_answers(server: Server, tmp_path: Path) -> None:
    server.may_answer.clear()
    file = tmp_path / "prompts.jsonl"
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
