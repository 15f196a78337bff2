"""A real Prometheus that scrapes a server, on loopback."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.dashboard import ALERTS
from tests.support.server import get, held_port, wait_for_answer

PROGRAM = shutil.which("prometheus")
"""None where Debian's package `prometheus`, or another that brings it, is not installed."""
WINDOW = "1h"
"""Of queries: longer than the tests with a Prometheus take on any machine."""


class Prometheus:
    """What a client asks of it."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **arguments: str) -> Any:
        query = urllib.parse.urlencode(arguments)
        answer = json.loads(get(f"http://{self._address}/api/v1/{path}?{query}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return what an expression is now: a list of series."""
        series: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return series

    def value(self, expression: str) -> float | None:
        series = self.query(expression)
        return float(series[0]["value"][1]) if series else None

    def wait_for(self, expression: str, value: float) -> None:
        """Wait until Prometheus has scraped at least this value."""
        deadline = time.monotonic() + 240
        while (found := self.value(expression)) is None or found < value:
            assert time.monotonic() < deadline, f"{expression} is {found}"
            time.sleep(0.2)


@contextlib.contextmanager
def scraping(server: str, folder: Path) -> Iterator[Prometheus]:
    """Have `server` scraped once a second, and the alerts evaluated; files lie in `folder`."""
    assert PROGRAM is not None
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {
                "job_name": "vllm",
                "static_configs": [{"targets": [server.removeprefix("http://")]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    log = folder / "prometheus.log"
    with held_port() as port, log.open("wb") as output:
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=output,
        )
        try:
            wait_for_answer(f"http://{address}/-/ready", process, log)
            prometheus = Prometheus(address)
            prometheus.wait_for(f"count_over_time(up[{WINDOW}])", 2)
            yield prometheus
        finally:
            process.terminate()
            try:
                process.wait(120)
            finally:
                process.kill()
