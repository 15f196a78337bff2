"""Records every panel of the Grafana dashboard from a server under load.

usage: python -m bench.dashboard [--prometheus PROGRAM] [--seconds SECONDS] [--out FILE.json]

Starts vLLM's server with the plugin, a small random model, a disk, and a Prometheus that scrapes it
every 5 seconds. Clients ask questions about documents of 900 tokens, some of which are far more
popular than others: one client for the first sixth of the time, then four. At the end, Prometheus
answers the queries of each panel in docs/grafana/kv-offload.json over the whole time, sent as by
Grafana. `python -m bench.dashboard.draw` draws FILE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bench.dashboard.draw import RESULT
from bench.machine import machine, write_result
from kv_offload.tools.arguments import add_count
from tests.support.mooncake import HeldPort
from tests.support.server import ask, get, serving, text, wait_for_answer

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/kv-offload.json"
SCRAPE_SECONDS = 5
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 200, 900, 20
CLIENTS = 4
HOST_BYTES, DISK_BYTES = "64MiB", "128MiB"

Panel = dict[str, Any]


def panels(dashboard: dict[str, Any]) -> list[Panel]:
    """Return the data for drawing each row and panel, with its queries by legend."""
    found = []
    for panel in dashboard["panels"]:
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        stacking = defaults.get("custom", {}).get("stacking", {}).get("mode", "none")
        found.append(
            {
                "type": panel["type"],
                "title": panel["title"],
                "place": [panel["gridPos"][key] for key in "xywh"],
                "unit": defaults.get("unit", ""),
                "max": defaults.get("max"),
                "stacked": stacking == "normal",
                "queries": {one["legendFormat"]: one["expr"] for one in panel.get("targets", ())},
            }
        )
    return found


def filled_in(query: str, seconds: int) -> str:
    """Return a query as Grafana sends it for the last `seconds` with everything selected."""
    query = query.replace("$__rate_interval", f"{4 * SCRAPE_SECONDS}s")
    return re.sub(r"\$\w+", ".*", query.replace("$__range", f"{seconds}s"))


def named(legend: str, labels: dict[str, str]) -> str:
    """Return the name of a series: its legend with the values of the labels in it."""
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)


def series_of(prometheus: str, panel: Panel, begin: float, seconds: int) -> list[dict[str, Any]]:
    """Return Prometheus's answers to a panel's queries: names, and values by second."""
    series = []
    for legend, query in panel["queries"].items():
        asked = urlencode(
            {
                "query": filled_in(query, seconds),
                "start": begin,
                "end": begin + seconds,
                "step": SCRAPE_SECONDS,
            }
        )
        answer = json.loads(get(f"{prometheus}/api/v1/query_range?{asked}"))
        for one in answer["data"]["result"]:
            values = [
                [round(at - begin), float(f"{float(value):.4g}")]
                for at, value in one["values"]
                if value not in ("NaN", "+Inf", "-Inf")
            ]
            series.append({"name": named(legend, one["metric"]), "values": values})
    return series


@contextlib.contextmanager
def scraping(program: str, server: str, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes a server; yield its base URL."""
    target = server.removeprefix("http://")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = HeldPort()
    url = f"http://127.0.0.1:{port.number}"
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address={url.removeprefix('http://')}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for_answer(f"{url}/-/ready", process, log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def load(server: str, seconds: int) -> int:
    """Ask questions about the documents for `seconds`; return how many were answered."""
    documents = [text(seed, DOCUMENT_TOKENS) for seed in range(DOCUMENTS)]
    popularity = [1 / (rank + 3) for rank in range(DOCUMENTS)]
    end = time.monotonic() + seconds
    answered = [0] * CLIENTS

    def client(number: int) -> None:
        chance = random.Random(number)
        if number:
            time.sleep(seconds / 6)
        while time.monotonic() < end:
            (document,) = chance.choices(documents, popularity)
            question = text(chance.randrange(1 << 30), QUESTION_TOKENS)
            ask(server, 0, prompt=f"{document} {question}", max_tokens=24)
            answered[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return sum(answered)


def record(prometheus: str, seconds: int) -> dict[str, Any]:
    """Run the server under load; return the panels with their series."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugin: dict[str, Any] = {
            "cpu_bytes": HOST_BYTES,
            "disk": {"path": str(folder / "disk"), "bytes": DISK_BYTES},
        }
        (folder / "disk").mkdir()
        with (
            serving(folder, words=("--max-model-len", "2048"), **plugin) as server,
            scraping(prometheus, server, folder) as url,
        ):
            begin = time.time()
            answered = load(server, seconds)
            shown = panels(json.loads(DASHBOARD.read_text()))
            for panel in shown:
                panel["series"] = series_of(url, panel, begin, seconds)
                del panel["queries"]
    facts = {
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
        "clients": CLIENTS,
        "answered": answered,
        "cpu_bytes": HOST_BYTES,
        "disk_bytes": DISK_BYTES,
        "seconds": seconds,
    }
    return {"machine": machine(), "load": facts, "panels": shown}


def main(words: Sequence[str] | None = None) -> int:
    """Record the panels and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--out", type=Path, default=RESULT)
    add_count(parser, "--seconds", of="seconds of load", default=360)
    arguments = parser.parse_args(words)
    write_result(arguments.out, record(arguments.prometheus, arguments.seconds), indent=None)
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
