"""The dashboard and the alert rules, as files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kv_offload.metrics import METRICS, PREFIX
from kv_offload.tools.status.figures import ERRORS
from tests.test_docs import anchors

FOLDER = Path(__file__).parents[2] / "docs/grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "kv-offload.json").read_text())
ALERTS = FOLDER / "alerts.yml"

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

QUERIES = {
    f"{panel['title']}, {target['legendFormat']}": str(target["expr"])
    for panel in PANELS
    for target in panel["targets"]
}
"""Every query of the dashboard, by its panel and its line there."""

TESTS_OF_ALERTS = Path(__file__).parent / "alerts.yml"
EXPORTED = {
    PREFIX + metric.name + suffix
    for metric in METRICS
    for suffix in {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket"]}[metric.kind]
}
OF_VLLM = {
    *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "vllm:time_to_first_token_seconds_bucket",
}
SELECTED = '{instance=~"$instance", model_name=~"$model", engine=~"$engine"}'


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def filled_in(query: str) -> str:
    """Return a query as Grafana sends it, with everything selected, of five minutes."""
    for variable in ("$__rate_interval", "$__range"):
        query = query.replace(variable, "5m")
    return re.sub(r"\$\w+", ".*", query)


@pytest.mark.parametrize(
    "query", [*QUERIES.values(), *(rule["expr"] for rule in alert_rules())], ids=str
)
def test_a_query_names_metrics_that_exist(query):
    names = set(re.findall(r"vllm:\w+", query))
    assert names
    assert names <= EXPORTED | OF_VLLM


def test_every_error_is_on_the_dashboard_and_has_an_alert():
    alerts = "".join(rule["expr"] for rule in alert_rules())
    for name in ERRORS:
        assert f"{name}_total" in QUERIES["Errors, errors"]
        assert f"{name}_total" in alerts


def test_every_reason_not_to_store_is_on_the_dashboard():
    shown = "".join(query for name, query in QUERIES.items() if name.startswith("Not stored"))
    reasons = [metric.name for metric in METRICS if metric.name.startswith("skipped_")]
    assert [name for name in reasons if f"{PREFIX}{name}_total" not in shown] == []


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows(panel):
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        for selected in re.findall(r"vllm:\w+(\{.*?\})?", target["expr"]):
            assert selected == SELECTED, "every metric is chosen by server, model and engine"


def test_the_dashboard_asks_for_a_data_source_servers_models_and_engines():
    first, *chosen = DASHBOARD["templating"]["list"]
    assert (first["name"], first["type"]) == ("datasource", "datasource")
    assert [variable["name"] for variable in chosen] == ["instance", "model", "engine"]
    for variable in chosen:
        assert variable["type"] == "query"
        assert variable["multi"], "several at once"
        assert variable["includeAll"]
        assert variable["current"]["value"] == "$__all"
    used = set(re.findall(r"\$(\w+)", " ".join(QUERIES.values())))
    assert used == {"instance", "model", "engine", "__rate_interval", "__range"}


def test_the_dashboard_links_to_its_alerts_and_to_other_dashboards():
    others, alerts = DASHBOARD["links"]
    assert set(others["tags"]) < set(DASHBOARD["tags"])
    searched = alerts["url"].partition("/alerting/list?search=")[2]
    assert searched
    assert all(rule["alert"].startswith(searched) for rule in alert_rules())


def test_every_alert_has_a_remedy_and_a_case_in_which_it_fires():
    cases = yaml.safe_load(TESTS_OF_ALERTS.read_text())["tests"]
    fires = "".join(
        sample["labels"]
        for case in cases
        for query in case.get("promql_expr_test", ())
        for sample in query.get("exp_samples", ())
    )
    silent = {rule["alertname"] for rule in cases[0]["alert_rule_test"]}
    for rule in alert_rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert len(rule["annotations"]["description"]) > 100
        assert f'alertname="{rule["alert"]}"' in fires
        assert rule["alert"] in silent


def test_every_alert_names_a_section_of_a_page():
    for rule in alert_rules():
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        page = FOLDER.parents[1] / file
        assert anchor in anchors(page), rule["alert"]


def test_engines_are_told_apart_and_no_panel_covers_another():
    query = QUERIES["Hit rate by engine, {{instance}}, engine {{engine}}"]
    assert query.count("sum by (instance, engine) ") == 2
    taken = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) == 23


def promtool(*command: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool, which Debian's package prometheus brings")
    done = subprocess.run([program, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command", [["check", "rules", str(ALERTS)], ["test", "rules", str(TESTS_OF_ALERTS)]]
)
def test_promtool_accepts_the_alerts(command):
    promtool(*command)


def test_promtool_accepts_every_query(tmp_path):
    rules = [
        {"record": f"query:{number}", "expr": filled_in(query)}
        for number, query in enumerate(QUERIES.values())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_where_the_pool_is_full_two_ranks_store_as_many_slots_as_are_replaced(tmp_path):
    """An engine of two ranks stores two slots a second, each in the place of another."""
    series = {
        "stored_slots_total": "0+120x20",
        "evictions_total": "0+120x20",
        "slot_bytes": "64x20",
        "stored_bytes_total": f"0+{120 * 2 * 64}x20",
    }
    labels = '{instance="a", model_name="m", engine="0"}'
    queries = [QUERIES[f"Stored and replaced slots, {line}"] for line in ("stored", "replaced")]
    two = {"eval_time": "15m", "exp_samples": [{"labels": "{}", "value": 2}]}
    case = {
        "interval": "1m",
        "input_series": [
            {"series": PREFIX + name + labels, "values": values} for name, values in series.items()
        ],
        "promql_expr_test": [{"expr": filled_in(query), **two} for query in queries],
    }
    file = tmp_path / "slots.yml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    promtool("test", "rules", str(file))
