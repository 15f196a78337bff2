"""Run in a separate process: an engine of two ranks, one of which is killed while it copies.

usage: python -m tests.engine.killed_rank_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

Returns the input of `check`: how the engine ended, and what it left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from vllm import LLM

from tests.engine.harness import engine_settings
from tests.engine.pressure_run import answer_all
from tests.support.inputs import busy_requests, transfer_config
from tests.support.latents import cache_prefixes_of_latents
from tests.support.processes import Forked, be_run, shut_down

RANKS = 2
END_SECONDS = 180.0
"""After a rank's death, seconds within which the error must appear, and then all processes end."""
CPU_BYTES = 64 << 20


def check(result: dict[str, Any], *, sharing: bool) -> None:
    """Check that the engine ended with an error, and left nothing of ours behind."""
    assert result["error"] == "EngineDeadError", result
    assert 0 <= result["seconds"] < END_SECONDS, result
    assert result["processes"] > RANKS, "the engine core, and its ranks"
    assert result["left"] == [], result
    assert bool(result["shared"]) == sharing, result
    for name, while_alive, afterwards in result["memory"]:
        assert while_alive > 0, f"{name} would have been seen"
        assert afterwards == 0, f"{name} is still there"
    assert result["dev_shm"] == [], result


def holders(name: str) -> int:
    """Return the number of processes that map shared memory."""
    found = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            found += name in maps.read_text()
    return found


def note_death(process: Forked, at: list[float]) -> None:
    """Record the time when a process has ended."""
    process.wait()
    at[0] = time.monotonic()


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from tests.engine import rank_faults

    # Ranks that wait for the killed one must end as soon as they do for users.
    os.environ.pop("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", None)
    cache_prefixes_of_latents()
    settings = engine_settings(
        Path(models), kind, **{"num_gpu_blocks_override": 260, "max_num_seqs": 16, **arguments}
    )
    asked = busy_requests(60)
    before = set(os.listdir("/dev/shm"))
    llm = LLM(**settings, kv_transfer_config=transfer_config({"cpu_bytes": CPU_BYTES}))
    places = llm.collective_rpc(rank_faults.places)
    # The resource tracker of Python's multiprocessing ends with this process.
    started = {
        child.pid: Forked(child.pid)
        for child in psutil.Process().children(recursive=True)
        if not any("resource_tracker" in word for word in child.cmdline())
    }
    assert {place["pid"] for place in places} <= started.keys()
    shared = sorted({name for place in places for name in place["shared"]})
    alive = [holders(name) for name in shared]
    llm.collective_rpc(rank_faults.disturb, args=([RANKS - 1], "die"))
    killed = next(place["pid"] for place in places if place["rank"] == RANKS - 1)
    death = [float("inf")]
    threading.Thread(target=note_death, args=(started[killed], death), daemon=True).start()
    error = "none"
    try:
        for _ in range(3):  # each round loads what the one before has stored
            answer_all(llm, asked)
    except Exception as raised:  # noqa: BLE001 - which one it was is what is told
        error = type(raised).__name__
    seconds = time.monotonic() - death[0]
    shut_down(llm)
    until = time.monotonic() + END_SECONDS
    while (left := [p for p in started if started[p].poll() is None]) and time.monotonic() < until:
        time.sleep(0.1)
    return {
        "error": error,
        "seconds": seconds,
        "processes": len(started),
        "left": [psutil.Process(pid).cmdline() for pid in left],
        "shared": shared,
        "memory": [(name, n, holders(name)) for name, n in zip(shared, alive, strict=True)],
        # The names of vLLM's queues between processes differ, and NCCL's have any letters. Other
        # tests may have pools there at the same time.
        "dev_shm": [
            n
            for n in set(os.listdir("/dev/shm")) - before
            if re.search("kv[-_](?!offload-test-)", n.lower())
        ],
    }


if __name__ == "__main__":
    be_run(main)
