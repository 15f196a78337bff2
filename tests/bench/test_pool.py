"""The bench of replicas that share host memory: what it asks, what it proves, what it shows."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.pool import __main__ as pool
from bench.pool.__main__ import COLUMNS, find_gpus, hashing_alike, settings_of, summary, unproven
from bench.pool.workload import WORKLOADS, Share
from bench.serving.report import table
from bench.serving.shapes import SHAPES

SMALL = WORKLOADS["small"]


def document(from_peers: float) -> dict[str, Any]:
    """Two turns of one conversation on two replicas, of which one waits for the other."""
    moved = {"loaded_bytes": 2e9, "stored_bytes": 3e9}
    request = {"ttft": 0.5, "prompt_tokens": 384, "cached_tokens": 192}
    turns = [
        [
            {"seconds": 1, "requests": [request], **moved, "peers_read_bytes": from_peers},
            {"seconds": 4, "requests": [], **moved, "peers_read_bytes": 0},
        ]
    ] * 2
    return {"columns": {"host_pool": {"turns": turns, "summary": summary(SMALL, {"turns": turns})}}}


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


def test_replicas_have_equal_memory_and_gpus_of_their_own_where_there_are_two():
    given = {}
    for column in COLUMNS:
        settings = settings_of(column, "small", ["2", "5"], Path("/memory"), "/model")
        assert [one.device for one in settings] == ["2", "5"][: len(settings)]
        given[column] = [one.options for one in settings]
        assert sum(one["cpu_bytes"] for one in given[column]) == SMALL.total_bytes
    assert all(one["host_pool_path"] == "/memory" for one in given["host_pool"])
    assert not any("host_pool" in one for one in given["separate"] + given["one"])
    one_gpu = settings_of("separate", "small", ["7"], Path("/memory"), "/model")
    assert [one.device for one in one_gpu] == ["7", "7"]
    none = settings_of("separate", "small", [], Path("/memory"), "/model")
    assert [one.device for one in none] == ["", ""]


def test_visible_gpus_are_used(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert find_gpus() == ["3", "1"]


def test_keys_mean_the_same_to_all_engines_and_the_environment_stays_as_it_was(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with hashing_alike():
        assert os.environ["PYTHONHASHSEED"] == "0"
    assert os.environ["PYTHONHASHSEED"] == "random"


def test_a_pool_must_be_read_and_separate_memory_must_not():
    assert unproven(document(1e9)) == []
    (problem,) = unproven(document(0))
    assert "host_pool: 0 bytes came from peers" in problem
    separate = {"columns": {"separate": document(1e9)["columns"]["host_pool"]}}
    (problem,) = unproven(separate)
    assert "separate: 2000000000 bytes came from peers" in problem
    (problem,) = unproven({"columns": {"one": {"turns": []}}})
    assert "stopped before the end" in problem


def test_the_table_counts_repeated_tokens_and_the_slower_replica():
    shown = table(document(1e9), "replicas")
    # 192 of 256 repeated tokens; 384 tokens and 4 of the answer in 4 s.
    assert "| host_pool | 2 | 75.0 | 500 | 500 | 0.1 | 8.0 | 2.0 | 12.0 |" in shown


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_replicas_are_compared(tmp_path):
    path = tmp_path / "pool.json"
    assert pool.main(["--out", str(path)]) == 0
    found = json.loads(path.read_text())["columns"]
    assert [*found] == [*COLUMNS]
    shares = {name: column["summary"]["hit_share"] for name, column in found.items()}
    assert shares["separate"] < shares["host_pool"]
    for name, column in found.items():
        assert len(column["turns"]) == SMALL.turns
        assert all(len(turn) == COLUMNS[name] for turn in column["turns"])
        requests = [one for turn in column["turns"] for of in turn for one in of["requests"]]
        assert len(requests) == SMALL.turns * SMALL.conversations
