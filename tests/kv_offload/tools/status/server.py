"""A server on loopback that answers with given pages."""

from __future__ import annotations

import contextlib
import http.server
import re
import socketserver
import threading
from collections.abc import Iterator, Mapping
from typing import Self

from kv_offload.metrics import METRICS, PREFIX

SIZES = {"slots": 2048, "pool_slots": 2048, "slot_bytes": 32768, "block_bytes": 32768}
COUNTED = {
    **SIZES,
    "lookup_tokens": 1800,
    "hit_tokens": 864,
    "synchronous_loads": 3,
    "stored_slots": 27,
    "slots_in_use": 27,
    "stored_bytes": 884736,
    "stored_seconds": 0.0101,
    "loaded_bytes": 884736,
    "loaded_seconds": 0.00105,
    "prefill_tokens_per_second": 17274.6,
    # Each of three loads.
    "load_seconds": 0.00035,
    "load_bytes": 294912,
    "request_hit_tokens": 288,
}
"""What vLLM's CPU engine counted of six prompts of 300 tokens, half of which had come before."""


def page_of(counted: Mapping[str, float], prompt_tokens: float) -> str:
    """Return what vLLM 0.32's server shows, without help and without what is not read here."""
    families = [("python_info", "gauge", {"": 1.0})]
    for metric in METRICS:
        value = float(counted.get(metric.name, 0))
        samples, suffix = {"": value}, "_total" if metric.kind == "counter" else ""
        if metric.kind == "histogram":
            loads = 3.0 * (value > 0)
            samples = {f"_bucket {bound}": loads * (value <= bound) for bound in metric.buckets}
            samples |= {"_bucket +Inf": loads, "_count": loads, "_sum": loads * value}
        families.append((f"{PREFIX}{metric.name}{suffix}", metric.kind, samples))
    for name, value in {"queries": prompt_tokens, "hits": 0.0}.items():
        families.append((f"vllm:prefix_cache_{name}_total", "counter", {"": value}))
    lines = []
    for name, kind, samples in families:
        lines.append(f"# TYPE {name} {kind}")
        for sample, value in samples.items():
            suffix, _, bound = sample.partition(" ")
            le = f'le="{bound}",' if bound else ""
            labels = f'engine="0",{le}model_name="small"'
            lines.append(f"{name}{suffix}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


HITS = page_of(COUNTED, 1800.0)
START = page_of(SIZES, 0.0)
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
