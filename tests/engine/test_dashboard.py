"""The dashboard's queries and the alerts, evaluated by a Prometheus that scrapes a server."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from kv_offload.metrics import LOAD_SECONDS_BUCKETS, PREFIX
from tests.support.dashboard import DASHBOARD, QUERIES, alert_rules, filled_in
from tests.support.prometheus import PROGRAM, WINDOW, Prometheus, scraping
from tests.support.server import hit, metric, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Prometheus]]:
    """A server that has had hits, and a Prometheus that has scraped it before and after."""
    if PROGRAM is None:
        pytest.skip("needs prometheus, as Debian's package of that name brings it")
    folder = tmp_path_factory.mktemp("scraped")
    with serving(folder) as server, scraping(server, folder) as prometheus:
        for seed in (1, 2, 3):
            first, again = hit(server, seed)
            assert first == again
        hits = metric(server, f"{PREFIX}hit_tokens_total")
        assert hits == 3 * 288
        prometheus.wait_for(f"{PREFIX}hit_tokens_total", hits)
        yield server, prometheus


def test_every_query_has_a_value_for_the_chosen_engines_alone(
    scraped: tuple[str, Prometheus],
) -> None:
    """Grafana sends several engines as `(0|1)`."""
    _, prometheus = scraped
    for name, query in QUERIES.items():
        both, other = (
            prometheus.value(filled_in(query.replace("$engine", engines), WINDOW))
            for engines in ("(0|1)", "(1)")
        )
        assert both is not None, name
        assert both >= 0, name
        assert math.isfinite(both), name
        assert other is None, name


def test_the_queries_say_what_happened(scraped: tuple[str, Prometheus]) -> None:
    server, prometheus = scraped

    def value(name: str) -> float:
        found = prometheus.value(filled_in(QUERIES[name], WINDOW))
        assert found is not None
        return found

    # Prometheus stretches what it saw, at either end by half the time between two readings.
    assert value("Tokens not computed again, tokens") == pytest.approx(3 * 288, rel=0.5)
    assert value("Hit rate of host memory, hit rate") == pytest.approx(864 / 1800, rel=0.1)
    assert value("Hit rates, GPU cache") == 0
    assert value("Host memory in use, in use") == pytest.approx(27 / 2048)
    assert value("Stored and replaced slots, stored") > 0
    assert value("Errors, errors") == 0
    load_seconds = metric(server, f"{PREFIX}loaded_seconds_total")
    # Up to the end of its bucket, which is at most 2.5 times its start.
    assert 0 < value("Time of a load, median") < 2.5 * load_seconds + LOAD_SECONDS_BUCKETS[0]
    speed = metric(server, f"{PREFIX}loaded_bytes_total") / load_seconds
    assert value("Speed while copying, from host memory") == pytest.approx(speed, rel=0.2)
    # What docs/use/metrics_reference.md says of vLLM's own.
    for theirs, ours in {
        "vllm:external_prefix_cache_queries_total": f"{PREFIX}lookup_tokens_total",
        "vllm:external_prefix_cache_hits_total": f"{PREFIX}hit_tokens_total",
    }.items():
        assert prometheus.value(theirs) == prometheus.value(ours) != 0


def test_the_variables_have_values(scraped: tuple[str, Prometheus]) -> None:
    server, prometheus = scraped
    found = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric_name, label = variable["query"]["query"][len("label_values(") : -1].split(", ")
            found[label] = {series["metric"][label] for series in prometheus.query(metric_name)}
    address = server.removeprefix("http://")
    assert found == {"instance": {address}, "model_name": {"small"}, "engine": {"0"}}


def test_the_alerts_are_evaluated_and_a_healthy_server_raises_none(
    scraped: tuple[str, Prometheus],
) -> None:
    server, prometheus = scraped
    deadline = time.monotonic() + 240
    while True:
        (group,) = prometheus.ask("rules")["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    states = {rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]}
    assert states == {rule["alert"]: ("ok", "inactive") for rule in alert_rules()}
    # The control: a server without our metrics is what one of them sees.
    (rule,) = (rule for rule in alert_rules() if rule["alert"] == "KVOffloadMissing")
    assert prometheus.query(rule["expr"]) == []
    (series,) = prometheus.query(rule["expr"].replace(PREFIX, "vllm:of_no_plugin_"))
    assert series["metric"]["instance"] == server.removeprefix("http://")
