"""The picture of the dashboard has every panel, with what Prometheus answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import pytest

from bench.dashboard.__main__ import DASHBOARD, filled_in, panels, series_of
from bench.dashboard.draw import COLUMN, PICTURE, RESULT, ROW, draw, shown

SVG = "{http://www.w3.org/2000/svg}"
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


def document() -> dict[str, Any]:
    """Every panel of the dashboard, each query with a line that rises to its number."""
    found = panels(IN_TREE)
    for panel in found:
        queries = panel.pop("queries")
        panel["series"] = [
            {"name": name, "values": [[0, 0.0], [60, float(number)]]}
            for number, name in enumerate(queries, 1)
        ]
    return {"load": {"seconds": 60}, "panels": found}


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


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


def test_every_panel_is_drawn_in_its_place_with_all_of_its_lines():
    given = document()
    picture = draw(given)
    root = ElementTree.fromstring(picture)
    groups = [one for one in root.findall(f"{SVG}g") if "translate" in one.get("transform", "")]
    assert len(groups) == len(given["panels"])
    for panel, group in zip(given["panels"], groups, strict=True):
        x, y, width, height = panel["place"]
        assert group.get("transform") == f"translate({x * COLUMN + 3} {y * ROW + 3})"
        written = [element.text for element in group.iter(f"{SVG}text")]
        assert written[0] == panel["title"]
        lines = [line.get("points", "").split() for line in group.iter(f"{SVG}polyline")]
        if panel["type"] == "timeseries":
            assert len(lines) == len(panel["series"])
            assert {one["name"] for one in panel["series"]} <= set(written)
        places = [tuple(map(float, point.split(","))) for line in lines for point in line]
        assert all(0 <= at_x <= width * COLUMN for at_x, _ in places)
        assert all(0 <= at_y <= height * ROW for _, at_y in places)


def test_a_stack_adds_up_and_a_value_without_data_says_so():
    panel = {"type": "timeseries", "title": "t", "place": [0, 0, 12, 8], "unit": "none"}
    series = [{"name": name, "values": [[0, 1.0], [60, 3.0]]} for name in "ab"]
    empty = {"type": "stat", "title": "none", "place": [12, 0, 4, 4], "unit": "s", "series": []}
    for stacked, highest in ((True, "6"), (False, "4")):
        one = {**panel, "stacked": stacked, "max": None, "series": series}
        written = texts(draw({"load": {"seconds": 60}, "panels": [one, empty]}))
        assert highest in written
        assert "no data" in written


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.594, "percentunit", "59.4 %"),
        (0.0042, "s", "4.2 ms"),
        (2.5, "s", "2.5 s"),
        (67108864, "bytes", "64 MiB"),
        (2.5e9, "Bps", "2.5 GB/s"),
        (71820, "short", "71.8k"),
        (0, "none", "0"),
    ],
)
def test_values_have_their_units(value, unit, text):
    assert shown(value, unit) == text


def test_the_kept_picture_is_that_of_the_kept_result():
    """`python -m bench.dashboard.draw` draws it again."""
    assert PICTURE.read_text() == draw(json.loads(RESULT.read_text()))
    assert PICTURE.stat().st_size < 300_000
