"""The bench of tiers with real engines: what it starts, what it proves, what it shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.tiers import __main__ as tiers
from bench.tiers import replicas
from bench.tiers.__main__ import options, parse, tables, unproven

MILLISECONDS = {"median": 0.0125, "min": 0.01, "max": 0.02}
BETWEEN = {"between_tokens": {"p50": 0.005, "p99": 0.0071}}


def document(bytes_read: float) -> dict[str, Any]:
    prompt = {"computed": MILLISECONDS, "host memory": MILLISECONDS, "below": MILLISECONDS}
    found = {**prompt, "bytes_read": bytes_read, "bytes_needed": 4096}
    return {"results": {"disk": {"first_token": {"1024": found}, "decodes": {"alone": BETWEEN}}}}


def test_engines_without_a_tier_come_first_and_last():
    asked = options(parse(["--disk", "/disk", "--disk-bytes", "8GiB"]), "host:1")
    assert list(asked) == ["no tier", "disk", "remote", "no tier, again"]
    assert asked["disk"]["disk"].items() >= {"path": "/disk", "bytes": "8GiB"}.items()
    assert asked["remote"]["remote"]["address"] == "host:1"
    assert all(own["load_or_recompute"] == "always_load" for own in asked.values())
    assert not any("eviction_policy" in own for own in asked.values()), "it is what ships"
    assert list(options(parse([]), None)) == ["no tier", "no tier, again"]


def test_what_was_not_read_from_below_is_named():
    assert unproven(document(4096)) == []
    (problem,) = unproven(document(4095))
    assert "disk, 1024 tokens: 4095 of 4096 bytes" in problem
    computed = document(4096)
    computed["results"]["disk"]["decodes"]["reading"] = {**BETWEEN, "promoted_bytes": 0.0}
    (problem,) = unproven(computed)
    assert "nothing was read" in problem


def test_what_the_tables_show():
    shown = tables(document(4096))
    assert "| disk | 1,024 | 12.5 (10.0 to 20.0) | 12.5" in shown
    assert "| disk | 5.0 / 7.1 | - | - | - |" in shown


def test_replicas_must_read_all_of_what_the_other_has_computed():
    found = {**dict.fromkeys(replicas.PLACES, MILLISECONDS), "blocks_read": 9, "blocks_needed": 9}
    measured = {"results": {"shared store": {"1024": found}}}
    assert replicas.unproven(measured) == []
    assert "| shared store | 1,024 | 12.5 (10.0 to 20.0) | 12.5" in replicas.table(measured)
    found["blocks_read"] = 8
    (problem,) = replicas.unproven(measured)
    assert "shared store, 1024 tokens: 8 of 9 blocks" in problem


@pytest.mark.slow
@pytest.mark.engine
def test_a_disk_is_measured(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    assert tiers.main(["--disk", str(folder), "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "tiers-small.json").read_text())["results"]
    assert list(found) == ["no tier", "disk", "no tier, again"]
    for result in found.values():
        moves = result["decodes"].values()
        assert any(phase["promoted_bytes"] for phase in moves) == (result is found["disk"])
