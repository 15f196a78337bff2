"""The files of `docs/grafana`, and what a test needs of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

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


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def filled_in(query: str) -> str:
    """Return a query as Grafana sends it, with everything selected, of five minutes."""
    for variable in ("$__rate_interval", "$__range"):
        query = query.replace(variable, "5m")
    return re.sub(r"\$\w+", ".*", query)
