"""A server on loopback that answers with given pages."""

from __future__ import annotations

import contextlib
import http.server
import re
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kv_offload.metrics import PREFIX

HITS = (Path(__file__).parent / "hits.txt").read_text()
"""Recorded of vLLM 0.32's server on a CPU, without help and the metrics that nobody here reads."""

START = re.sub(r"^(vllm:(?!\w+_(slots|slot_bytes)\b).*\}) .*$", r"\1 0.0", HITS, flags=re.M)
"""The same server before its first request: it has a pool, and has counted nothing."""


def having(page: str, name: str, value: object) -> str:
    """Return a page of one engine in which a sample of ours has another value."""
    sample = re.compile(rf"^({PREFIX}{name}\{{.*\}}) .*$", re.MULTILINE)
    changed, found = sample.subn(rf"\1 {value}", page)
    assert found == 1
    return changed


def hits_with(name: str, value: object) -> str:
    """Return the page of hits in which a sample of ours has another value."""
    return having(HITS, name, value)


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers `/metrics` with `page`, everything else with 404.

    Servers of `http.server` ask a name server for the name of their address, which may take long.
    """

    daemon_threads = True
    allow_reuse_address = True

    page = HITS
    answered = 0

    def __init__(self, handler: type[PageHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or PageHandler)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class PageHandler(http.server.BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        here = self.path == "/metrics"
        self.answer(self.server.page if here else "", 200 if here else 404)
        self.server.answered += here

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def page_server(page: str = HITS) -> Iterator[PageServer]:
    with PageServer().running() as server:
        server.page = page
        yield server
