"""Run by `test_tiers.py` in separate processes: engines on a GPU with a tier.

usage: python -m tests.gpu.tier_run write MODELS_FOLDER PLUGIN_AS_JSON READY
       python -m tests.gpu.tier_run serve MODELS_FOLDER PLUGIN_AS_JSON
       python -m tests.gpu.tier_run join MODELS_FOLDER PLUGIN_AS_JSON

`write` answers the prompts of `engine_run`. Once the tier has all of them, it writes the number of
their blocks to the file READY, and waits to be killed. `serve` answers the prompts from the tier,
and `join` from another engine of its host pool; both print the result as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Engine, corrupt_arenas, engine, patiently
from tests.engine.rank_calls import poison
from tests.gpu.engine_run import SETTINGS, corrupt, one_by_one
from tests.support.mooncake import missing
from tests.support.patience import be_patient
from tests.support.processes import print_result, stay

KIND = "qwen3"
INDEX_SECONDS = 1.0
"""After this time a disk's index lists what was written."""


def settle(running: Engine) -> None:
    """Wait until everything is stored, and written to the tier."""
    running.settle()
    assert not running.offload.gauges().get("demoting_slots")  # a pool has none


def write(models: Path, plugin: dict[str, Any], ready: str) -> None:
    """Compute the prompts, write them to the tier, and wait to be killed."""
    with engine(models, KIND, plugin, **SETTINGS) as ours:
        one_by_one(ours)
        settle(ours)
        time.sleep(INDEX_SECONDS)
        stay(ready, ours.totals["demoted_slots"])


def meet(running: Engine) -> None:
    """Wait until loads can read all of a peer's memory, which is page-locked piece by piece."""
    for _ in patiently(200):
        gauges = running.offload.gauges()
        if gauges["peer_slots"] >= gauges["pool_slots"] == gauges["slots"]:
            return
        running.generate([[1, 2, 3]], max_tokens=1)
        time.sleep(0.02)
    raise AssertionError(f"the peer's memory is not page-locked: {gauges}")


def serve(models: Path, plugin: dict[str, Any], *, joins: bool = False) -> None:
    """Answer the prompts without the plugin, from tier or pool, and from garbage in host memory."""
    with engine(models, KIND, **SETTINGS) as plain:
        one_by_one(plain)
        result: dict[str, Any] = {"expected": one_by_one(plain)}
    with engine(models, KIND, plugin, **SETTINGS) as ours:
        if joins:
            meet(ours)
        poison(None)
        result["answers"] = one_by_one(ours)
        result["loaded_blocks"] = ours.blocks_loaded()
        result["totals"] = dict(ours.totals)
        settle(ours)
        ours.reset_gpu_cache()
        if joins:
            corrupt_arenas(Path(plugin["host_pool_path"]))
        else:
            corrupt(ours.slots, KIND)
        result["corrupted"] = one_by_one(ours)
        ours.assert_nothing_left()
    print_result(result)


def main(part: str, models: str, plugin: str, ready: str = "") -> None:
    be_patient(pytest.MonkeyPatch())
    missing()  # loads Mooncake's libraries, if it is installed
    if part == "write":
        write(Path(models), json.loads(plugin), ready)
    else:
        serve(Path(models), json.loads(plugin), joins=part == "join")


if __name__ == "__main__":
    main(*sys.argv[1:])
