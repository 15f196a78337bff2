"""Engines on a GPU with a disk, a store or a host pool: one loads what another has computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.harness import full_blocks
from tests.gpu.engine_run import PROMPTS
from tests.support.mooncake import PATIENT, Master, environment, require_mooncake
from tests.support.processes import run_module, staying

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

RUN = "tests.gpu.tier_run"
BLOCKS = full_blocks(PROMPTS)
ALWAYS = {"load_or_recompute": "always_load"}  # a small model computes faster


@pytest.fixture(params=["V1", "V2"])
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if request.param == "V2" else "0",
        "PYTHONHASHSEED": "0",
    }


def check(result: dict[str, Any], *, promoted: int = BLOCKS) -> None:
    """Check that all but a twentieth of the blocks left were served, and that they were needed."""
    totals = result["totals"]
    print(totals)
    assert result["answers"] == result["expected"]
    assert totals.get("promoted_slots", 0) >= 0.95 * promoted, totals
    assert result["loaded_blocks"] >= 0.95 * BLOCKS, totals
    wrong, right = result["corrupted"], result["expected"]
    assert all(w != r for w, r in zip(wrong, right, strict=True))


@pytest.mark.filterwarnings("default")
def test_a_disk_serves_an_engine_that_was_started_again_after_kill_9(tmp_path, variables):
    plugin = {"disk": {"path": str(tmp_path / "disk"), "bytes": "256MiB"}, **ALWAYS}
    (tmp_path / "disk").mkdir()
    words = (RUN, "write", tmp_path, json.dumps(plugin))
    with staying(*words, folder=tmp_path, **variables) as (process, _):
        assert process.poll() is None
    check(run_module(RUN, "serve", tmp_path, plugin, timeout_seconds=300, **variables))


@pytest.mark.filterwarnings("default")
def test_an_engine_takes_over_the_host_pool_of_one_that_was_killed(
    tmp_path, variables, memory_folder
):
    plugin = {"host_pool": "chat", "host_pool_path": str(memory_folder), **ALWAYS}
    words = (RUN, "write", tmp_path, json.dumps(plugin))
    with staying(*words, folder=tmp_path, **variables) as (process, _):
        assert process.poll() is None
    check(run_module(RUN, "serve", tmp_path, plugin, timeout_seconds=300, **variables), promoted=0)


@pytest.mark.filterwarnings("default")
def test_an_engine_serves_what_another_one_of_its_host_pool_has(tmp_path, variables, memory_folder):
    """Both run on one GPU, and the second stored none of it itself."""
    plugin = {"host_pool": "chat", "host_pool_path": str(memory_folder), **ALWAYS}
    words = (RUN, "write", tmp_path, json.dumps(plugin))
    with staying(*words, folder=tmp_path, **variables) as (process, _):
        result = run_module(RUN, "join", tmp_path, plugin, timeout_seconds=300, **variables)
        assert process.poll() is None
    check(result, promoted=0)
    totals = result["totals"]
    assert totals["peers_read_bytes"] == totals["loaded_bytes"]


@pytest.mark.filterwarnings("default")
def test_a_store_serves_what_another_engine_has_computed(tmp_path, variables):
    require_mooncake()
    more = environment() | PATIENT | variables
    with Master() as master:
        remote = {"kind": "mooncake", "address": master.address}
        first = {"remote": {**remote, "bytes": "256MiB"}, **ALWAYS}
        words = (RUN, "write", tmp_path, json.dumps(first))
        with staying(*words, folder=tmp_path, **more) as (_, said):
            assert int(said) >= BLOCKS
            second = {"remote": {**remote, "bytes": 0}, **ALWAYS}
            check(run_module(RUN, "serve", tmp_path, second, timeout_seconds=300, **more))
