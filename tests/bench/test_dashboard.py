"""The picture of the dashboard has every panel, with what Prometheus answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from bench.dashboard.__main__ import DASHBOARD, filled_in, panels, series_of
from bench.dashboard.draw import PICTURE, RESULT, draw

IN_TREE: dict[str, Any] = json.loads(DASHBOARD.read_text())


class Answers(BaseHTTPRequestHandler):
    """Answers range queries as Prometheus does, with two engines; notes what it was asked."""

    asked: list[dict[str, str]]

    def do_GET(self) -> None:
        asked = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        self.asked.append(asked)
        begin = float(asked["start"])
        result = [
            {
                "metric": {"engine": engine},
                "values": [[begin, "NaN"], [begin + 5, "0.123456"], [begin + 10, "2"]],
            }
            for engine in "01"
        ]
        body = json.dumps({"status": "success", "data": {"result": result}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def prometheus() -> Iterator[str]:
    Answers.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_panel_and_query_of_the_dashboard_is_read():
    read = {panel["title"]: panel["queries"] for panel in panels(IN_TREE)}
    assert len(read) == len(IN_TREE["panels"]) > 20
    for panel in IN_TREE["panels"]:
        assert [*read[panel["title"]].values()] == [t["expr"] for t in panel.get("targets", ())]
    for queries in read.values():
        assert not any("$" in filled_in(query, 60) for query in queries.values())


def test_answers_of_prometheus_become_series_with_seconds_since_the_start(prometheus):
    panel = {"queries": {"{{engine}} of all": 'a{b=~"$b"}[$__range]'}}
    series = series_of(prometheus, panel, 1000.0, 60)
    assert series == [
        {"name": f"{engine} of all", "values": [[5, 0.1235], [10, 2.0]]} for engine in "01"
    ]
    (asked,) = Answers.asked
    assert asked["query"] == 'a{b=~".*"}[60s]'
    assert (asked["start"], asked["end"]) == ("1000.0", "1060.0")


def test_the_kept_picture_is_that_of_the_kept_result():
    """`python -m bench.dashboard.draw` draws it again."""
    assert PICTURE.read_text() == draw(json.loads(RESULT.read_text()))
    assert PICTURE.stat().st_size < 300_000
