"""Reading the metrics page of a server, and what is said of one that has none."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kv_offload.errors import ServerError
from kv_offload.metrics import METRICS, PREFIX
from kv_offload.tools.status.read import MAX_PAGE_BYTES, metrics_url, parse, read
from tests.kv_offload.tools.status.server import HITS, hits_with, page_server

FOUND = "HTTP/1.1 302 Found\r\nLocation:"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://localhost:8000/metrics", "http://localhost:8000/metrics"),
        ("https://gate.example/engines/3?a=b", "https://gate.example/engines/3/metrics"),
    ],
)
def test_addresses_of_a_server(address, url):
    assert metrics_url(address) == url


@pytest.mark.parametrize(
    "address",
    [
        *("", "ftp://a:1", "localhost:http", "localhost:65536", "[::1:8000", "a..b:80"),
        *("http://localhost/ü", "me:secret@localhost:8000", "8000", __file__),
    ],
)
def test_what_is_no_address_is_refused_with_an_example(address):
    with pytest.raises(ServerError, match="write localhost:8000") as caught:
        metrics_url(address)
    assert repr(address) in str(caught.value)


def test_every_metric_of_a_page_is_read():
    reading = parse(HITS, "here")
    assert (reading.engines, reading.model) == (("0",), "small")
    for metric in METRICS:
        name = PREFIX + metric.name
        if metric.kind == "histogram":
            assert reading.values["0"][f"{name}_count"] == 3
            assert len(reading.buckets[name, "0"]) == len(metric.buckets) + 1
        else:
            suffix = "_total" if metric.kind == "counter" else ""
            assert f"{name}{suffix}" in reading.values["0"]
    assert reading.values["0"]["vllm:prefix_cache_queries_total"] == 6 * 300


def test_engines_are_told_apart_and_samples_with_other_labels_added():
    name = "vllm:host_kv_cache_slots"
    samples = [("10", 1, 3), ("2", 1, 5), ("2", 2, 2)]
    labels = 'engine="{}",pid="{}",model_name="sm\x1b[2Jall"'
    lines = [f"{name}{{{labels.format(engine, pid)}}} {n}\n" for engine, pid, n in samples]
    reading = parse("".join(lines) + 'vllm:other{engine="0"} NaN\n', "here")
    assert reading.engines == ("2", "10")
    assert reading.model == "sm?[2Jall", "no escapes for a terminal"
    assert reading.values == {"2": {name: 7}, "10": {name: 3}}


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("python_info 1\n", "has no metrics of vLLM: .*--disable-log-stats"),
        ('vllm:a{engine="0"} 0\n', "without kv-offload: .*not in use.*VLLM_PLUGINS"),
        ("<html>It works</html>", "not a page of metrics .*API server"),
    ],
)
def test_a_page_without_our_metrics_says_what_may_be_the_reason(page, message):
    with page_server(page) as server, pytest.raises(ServerError, match=message) as caught:
        read(metrics_url(server.address))
    assert server.address in str(caught.value)


@pytest.mark.parametrize("answers", [True, False], ids=["an error", "no answer"])
def test_a_proxy_of_the_environment_is_named(monkeypatch, answers):
    """Else the message would blame a server that was never asked."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with page_server() as server, answering("HTTP/1.1 407 Who are you?") as proxy:
        where = proxy if answers else "127.0.0.1:1"
        monkeypatch.setenv("http_proxy", f"http://user:secret@{where}")
        with pytest.raises(ServerError, match=rf"through {where}, which http_proxy") as caught:
            read(metrics_url(server.address))
        assert "secret" not in str(caught.value)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert read(metrics_url(server.address)).model == "small"
        if not answers:  # the played proxy waits for one reader
            socket.create_connection(proxy.split(":")).close()


@contextlib.contextmanager
def answering(
    head: str, answer: Callable[[socket.socket], object] = lambda _: None, *, ends_head: bool = True
) -> Iterator[str]:
    """Give the address of a server that sends `head` and what `answer` does to its one reader."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the reader has gone
            connection.recv(65536)
            connection.sendall((head + "\r\n\r\n" * ends_head).encode())
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


# Where a redirection leads nowhere, urllib leaves the first connection to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("HTTP/1.1 503 No", "HTTP status 503 .*check the address"),
        ("220 mail.example", "cannot be reached: .*check the address"),
        (f"{FOUND} http://[x", "cannot be reached: .*check the address"),
        # A proxy that asks who you are leads to its own page.
        (f"{FOUND} http://{{}}/metrics", "leads to http://{}/metrics, is not a page"),
    ],
)
def test_a_server_that_answers_with_something_else_is_named(head, message):
    with (
        page_server("<html>Who are you?</html>") as other,
        answering(head.format(other.address)) as address,
        pytest.raises(ServerError, match=message.format(other.address)) as caught,
    ):
        read(metrics_url(address))
    assert address in str(caught.value)
    gc.collect()  # here, and not in another test


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        (f"Content-Length: {len(HITS)}", HITS[: HITS.rindex("\n", 0, -1) + 1]),
        ("Transfer-Encoding: chunked", f"{len(HITS):x}\r\n{HITS}\r\n"),
    ],
)
def test_a_part_of_a_page_is_not_taken_for_all_of_it(header, sent):
    with (
        answering(f"HTTP/1.1 200 OK\r\n{header}", lambda c: c.sendall(sent.encode())) as address,
        pytest.raises(ServerError, match="IncompleteRead"),
    ):
        read(metrics_url(address))


@pytest.mark.parametrize(
    "head",
    ["", "HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"],
    ids=["status line", "header", "page"],
)
def test_an_answer_that_comes_bit_by_bit_is_not_waited_for_without_end(monkeypatch, head):
    monkeypatch.setattr("kv_offload.tools.status.read.ANSWER_SECONDS", 0.2)

    def trickle(connection: socket.socket) -> None:
        for _ in range(3000):
            connection.sendall(b"#")
            time.sleep(0.01)

    with (
        answering(head, trickle, ends_head=False) as address,
        pytest.raises(ServerError, match=r"the answer has not ended in 0\.2 s"),
    ):
        read(metrics_url(address))


@pytest.mark.parametrize("header", ["", "\r\nTransfer-Encoding: chunked"], ids=["bare", "chunked"])
def test_an_answer_without_end_is_refused_at_the_limit(header):
    part = b"vllm:endless 1\n" * 4096
    piece = b"%x\r\n%b\r\n" % (len(part), part) if header else part

    def stream(connection: socket.socket) -> None:
        for _ in range(MAX_PAGE_BYTES // len(part) + 2):
            connection.sendall(piece)
        connection.recv(1)  # a reader that wants more than the limit gets nothing

    with (
        answering(f"HTTP/1.1 200 OK{header}", stream) as address,
        pytest.raises(ServerError, match=r"more than 16 MiB, the limit .*; give the address"),
    ):
        read(metrics_url(address))


@pytest.mark.parametrize(
    "page",
    [
        *("<html>\n<body>no</body></html>", f'{PREFIX}slots{{le="many"}} 1', "\x00\x1b" * 999),
        HITS + "# HELP \xa0 x\n",  # no name
        *(hits_with("slots", value) for value in ("NaN", "+Inf", "-1.0", "1e300")),
    ],
)
def test_another_page_or_a_value_that_no_engine_has_is_one_short_line(page):
    with pytest.raises(ServerError, match="here is not a page of metrics") as caught:
        parse(page, "here")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
