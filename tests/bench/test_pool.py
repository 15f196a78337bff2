"""The bench of replicas that share host memory: what it asks, what it proves, what it shows."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.pool import __main__ as pool
from bench.pool.__main__ import COLUMNS, find_gpus, settings_of, summary, unproven
from bench.pool.workload import WORKLOADS, Share
from bench.serving.report import table
from bench.serving.shapes import SHAPES
from bench.tiers.__main__ import sharing_environment
from tests.support.mooncake import require_mooncake

SMALL = WORKLOADS["small"]


def document(column: str, *, from_peers: float = 0, from_store: float = 0) -> dict[str, Any]:
    """Two turns of one conversation on two replicas, of which one waits for the other."""
    moved = {"loaded_bytes": 2e9, "stored_bytes": 3e9}
    shared = {"peers_read_bytes": from_peers, "remote_read_bytes": from_store}
    request = {"ttft": 0.5, "prompt_tokens": 384, "cached_tokens": 192}
    turns = [
        [
            {"seconds": 1, "requests": [request], **moved, **shared},
            {"seconds": 4, "requests": [], **moved, **dict.fromkeys(shared, 0)},
        ]
    ] * 2
    return {"columns": {column: {"turns": turns, "summary": summary(SMALL, {"turns": turns})}}}


@pytest.mark.parametrize("name", WORKLOADS)
def test_replicas_share_the_conversations_of_a_turn_equally_and_exchange_them(name):
    workload = WORKLOADS[name]
    seen = []
    for turn in range(workload.turns):
        prompts = [Share(workload, replica, 2).prompts(turn) for replica in (0, 1)]
        assert len(prompts[0]) == len(prompts[1]) == workload.conversations / 2
        assert sorted(prompts[0] + prompts[1]) == sorted(Share(workload, 0, 1).prompts(turn))
        seen.append({tuple(one[: workload.first_tokens]) for one in prompts[0]})
    assert all(before != after for before, after in itertools.pairwise(seen))
    first, last = workload.prompt(3, 0), workload.prompt(3, workload.turns - 1)
    assert last[: len(first)] == first
    assert len(last) < SHAPES[name].max_model_len - workload.answer_tokens


@pytest.mark.parametrize("name", WORKLOADS)
def test_host_memory_has_room_for_what_one_replica_sees_only_if_no_block_is_there_twice(name):
    workload, item_bytes = WORKLOADS[name], 2 if name == "gqa8" else 4
    tokens = workload.conversations * workload.prompt_tokens(workload.turns - 1)
    nbytes = tokens * SHAPES[name].token_bytes(item_bytes)
    assert workload.total_bytes / 2 < nbytes < 2 * workload.total_bytes


def of(column: str, gpus: list[str]) -> list[Any]:
    return settings_of(column, "small", gpus, Path("/memory"), "host:1", "/model")


def test_replicas_have_equal_memory_and_gpus_of_their_own_where_there_are_two():
    given = {}
    for column in COLUMNS:
        settings = of(column, ["2", "5"])
        assert [one.device for one in settings] == ["2", "5"][: len(settings)]
        given[column] = options = [one.options for one in settings]
        assert all(one == options[0] for one in options)
        nbytes = [one["cpu_bytes"] + one.get("remote", {}).get("bytes", 0) for one in options]
        assert sum(nbytes) == SMALL.total_bytes
    assert all(one["host_pool_path"] == "/memory" for one in given.pop("host_pool"))
    assert all(one["remote"]["address"] == "host:1" for one in given.pop("mooncake"))
    assert [*given] == ["separate", "one"]
    assert all([*one] == ["cpu_bytes"] for options in given.values() for one in options)
    assert [one.device for one in of("separate", ["7"])] == ["7", "7"]
    assert [one.device for one in of("separate", [])] == ["", ""]


def test_visible_gpus_are_used(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert find_gpus() == ["3", "1"]


def test_keys_mean_the_same_to_all_engines_and_the_environment_stays_as_it_was(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with sharing_environment():
        assert os.environ["PYTHONHASHSEED"] == "0"
    assert os.environ["PYTHONHASHSEED"] == "random"


@pytest.mark.parametrize("column", COLUMNS)
def test_only_the_pool_reads_peers_and_only_the_store_is_read(column):
    peers, store = column == "host_pool", column == "mooncake"
    for from_peers, from_store in itertools.product((0, 1e9), repeat=2):
        problems = unproven(document(column, from_peers=from_peers, from_store=from_store))
        expected = {
            "peers_read_bytes": (from_peers, peers),
            "remote_read_bytes": (from_store, store),
        }
        assert problems == [
            f"NOT PROVEN: {column}: {name} is {2 * nbytes:.0f}"
            for name, (nbytes, wanted) in expected.items()
            if (nbytes > 0) is not wanted
        ]


def test_a_column_that_was_stopped_is_named():
    (problem,) = unproven({"columns": {"one": {"turns": []}}})
    assert "stopped before the end" in problem


def test_the_table_counts_repeated_tokens_and_the_slower_replica():
    # 192 of 256 repeated tokens; 384 tokens and 4 of the answer in 4 s.
    row = "| 2 | 75.0 | 500 | 500 | 0.1 | 8.0 | 2.0 | 12.0 |"
    assert f"| host_pool {row}" in table(document("host_pool", from_peers=1e9), "replicas")
    assert f"| mooncake {row}" in table(document("mooncake", from_store=1e9), "replicas")


def test_nothing_is_measured_where_mooncake_is_asked_for_and_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "missing", lambda: "no wheel")
    assert pool.main(["--out", str(tmp_path / "pool.json")]) == 1
    assert "mooncake: no wheel" in capsys.readouterr().err
    assert not (tmp_path / "pool.json").exists()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_replicas_are_compared(tmp_path):
    require_mooncake()
    path = tmp_path / "pool.json"
    assert pool.main(["--out", str(path)]) == 0
    found = json.loads(path.read_text())["columns"]
    assert [*found] == [*COLUMNS]
    shares = {name: column["summary"]["hit_share"] for name, column in found.items()}
    assert shares["separate"] < shares["host_pool"]
    assert found["mooncake"]["options"]["remote"]["bytes"] == SMALL.total_bytes // 4
    for name, column in found.items():
        assert len(column["turns"]) == SMALL.turns
        assert all(len(turn) == COLUMNS[name] for turn in column["turns"])
        requests = [one for turn in column["turns"] for of in turn for one in of["requests"]]
        assert len(requests) == SMALL.turns * SMALL.conversations
