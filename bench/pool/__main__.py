"""Compares replicas that share host memory with replicas that do not, with real engines.

usage: python -m bench.pool [--shape small|gqa8] [--columns host_pool,separate,one,mooncake]
                            [--pool-path FOLDER] [--out FILE.json]

    host_pool  two replicas, each with half of the host memory, in one pool
    separate   two replicas, each with half of the host memory to itself
    one        one replica with all of the host memory
    mooncake   two replicas, each with a quarter of the host memory to itself; the other half goes
               to a Mooncake store

Conversations send one request per turn, each to a replica drawn at random; half of them go to each.
A turn begins when the previous one has ended on all replicas. All columns have the same prompts and
the same number of concurrent requests per replica.

Each replica has its own GPU, by CUDA_VISIBLE_DEVICES; on a host with one GPU, both use that one.
Replicas start at the same time. `gqa8` takes 48 GiB of host memory, which for the pool is in FOLDER
(a tmpfs with room, /dev/shm by default). The whole run takes seven to eight minutes. Writes to the
store are not limited; as by default, prompts that are faster to compute are not read from it.

Results are written to FILE after each turn, so that a run that a time limit stops keeps its
measurements. The exit status is 1 if an engine failed, if the pool's replicas did not read each
other's memory, if those with a store did not read the store, or if others did.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import names
from bench.machine import machine, output_of, write_result
from bench.pool.workload import WORKLOADS, Share, Workload
from bench.serving.process import EngineError, EngineProcess, progress
from bench.serving.report import table
from bench.serving.settings import OURS, EngineSettings
from bench.tiers.__main__ import RATE, sharing_environment
from tests.support.mooncake import Master, missing

POOL, SEPARATE, ONE, MOONCAKE = "host_pool", "separate", "one", "mooncake"
COLUMNS = {POOL: 2, SEPARATE: 2, ONE: 1, MOONCAKE: 2}
"""Number of replicas by column."""
SHARED = {"peers_read_bytes": POOL, "remote_read_bytes": MOONCAKE}
"""Counters of bytes from shared memory, each with the only column in which it is not 0."""

Document = dict[str, Any]
Column = dict[str, Any]


def find_gpus() -> list[str]:
    """Return the names of this host's visible GPUs, for CUDA_VISIBLE_DEVICES."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    listed = output_of("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    return listed.split() if listed else []


def settings_of(
    column: str, shape: str, gpus: Sequence[str], pool_path: Path, master: str, model: str
) -> list[EngineSettings]:
    """Return the settings of a column's replicas."""
    workload, replicas = WORKLOADS[shape], COLUMNS[column]
    nbytes = workload.total_bytes // replicas
    options: dict[str, Any] = {"cpu_bytes": nbytes}
    if column == POOL:
        options |= {"host_pool": "bench", "host_pool_path": str(pool_path)}
    if column == MOONCAKE:
        given = nbytes // 2
        remote = {"kind": "mooncake", "address": master, "bytes": given, "write_rate": RATE}
        options = {"cpu_bytes": nbytes - given, "remote": remote}
    return [
        EngineSettings(
            replace(workload.shape(shape), gpu_blocks=workload.gpu_blocks),
            OURS,
            model,
            options,
            share=Share(workload, replica, replicas),
            device=gpus[replica % len(gpus)] if gpus else "",
        )
        for replica in range(replicas)
    ]


class Replicas:
    """The engines of a column, each in a separate process, which imports vLLM at once."""

    def __init__(self, column: str, settings: Sequence[EngineSettings]) -> None:
        self.column = column
        self.options = settings[0].options
        self._processes = [EngineProcess(one) for one in settings]

    def ask(self, name: str) -> list[Any]:
        """Ask all engines at the same time; return their answers. Raises `EngineError`."""
        return self._all(lambda process: process.ask(name))

    def kill(self) -> None:
        """Kill the engines: they have already answered with all measurements."""
        self._all(EngineProcess.kill)

    def _all(self, call: Callable[[EngineProcess], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self._processes)) as threads:
            return [*threads.map(call, self._processes)]


def measure(
    replicas: Replicas, workload: Workload, column: Column, keep: Callable[[], None]
) -> None:
    """Serve all turns on the replicas of a column, and fill in its results."""
    progress(f"{replicas.column}: starting")
    column["start_seconds"] = replicas.ask("start")
    column["peers"] = replicas.ask("meet")
    for _ in range(workload.turns):
        column["turns"].append(replicas.ask("turn"))
        keep()


def summary(workload: Workload, column: Column) -> dict[str, float]:
    """Return a column's figures over all turns but the first, which no cache can serve."""
    turns = column["turns"][1:]
    requests = [one for turn in turns for replica in turn for one in replica["requests"]]
    seconds = sum(max(replica["seconds"] for replica in turn) for turn in turns)
    times = [one["ttft"] for one in requests]
    # A prompt of a later turn repeats the conversation's last prompt.
    repeated = sum(one["prompt_tokens"] - workload.added_tokens for one in requests)
    everything = [*itertools.chain.from_iterable(column["turns"])]
    return {
        "replicas": len(turns[0]),
        "hit_share": sum(one["cached_tokens"] for one in requests) / repeated,
        "ttft_p50": float(np.percentile(times, 50)),
        "ttft_p90": float(np.percentile(times, 90)),
        "tokens_per_second": sum(one["prompt_tokens"] + workload.answer_tokens for one in requests)
        / seconds,
        "loaded_bytes": sum(replica["loaded_bytes"] for replica in everything),
        **{name: sum(replica[name] for replica in everything) for name in SHARED},
        "stored_bytes": sum(replica["stored_bytes"] for replica in everything),
    }


def unproven(document: Document) -> list[str]:
    """Name the columns that failed or that read the wrong memory."""
    problems = []
    for name, column in document["columns"].items():
        if "error" in column:
            problems.append(f"{name}: {column['error']}")
        elif "summary" not in column:
            problems.append(f"{name}: stopped before the end")
        else:
            problems += [
                f"NOT PROVEN: {name}: {counter} is {column['summary'][counter]:.0f}"
                for counter, only in SHARED.items()
                if (column["summary"][counter] > 0) is not (name == only)
            ]
    return problems


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--shape", choices=WORKLOADS, default="small")
    parser.add_argument("--columns", type=names(COLUMNS), default=[*COLUMNS])
    parser.add_argument("--pool-path", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, help="file for the result")
    return parser.parse_args(words)


def run(arguments: argparse.Namespace, document: Document, pool_path: Path, master: Master) -> None:
    """Measure all columns one after the other; the master runs only for its own column."""
    shape, workload = arguments.shape, WORKLOADS[arguments.shape]
    # vLLM finds its compiled code by the model's path, even in a later run.
    model = str(Path(tempfile.gettempdir()) / f"bench-serving-{shape}")
    started: list[Replicas] = []

    def spawn(column: str) -> Replicas:
        gpus = document["gpus"]
        settings = settings_of(column, shape, gpus, pool_path, master.address, model)
        started.append(Replicas(column, settings))
        return started[-1]

    def keep() -> None:
        if arguments.out:
            write_result(arguments.out, document)

    try:
        replicas = spawn(arguments.columns[0])
        for name, following in zip(arguments.columns, [*arguments.columns[1:], None], strict=True):
            # Importing vLLM takes seconds.
            ahead = spawn(following) if following else None
            column: Column = {"options": replicas.options, "turns": []}
            document["columns"][name] = column
            try:
                if name == MOONCAKE:
                    master.start()
                measure(replicas, workload, column, keep)
                column["summary"] = summary(workload, column)
            except EngineError as error:
                column["error"] = str(error)
                progress(str(error))
            replicas.kill()
            master.kill()
            keep()
            replicas = ahead or replicas
    finally:
        for one in started:
            one.kill()


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit status."""
    arguments = parse(words)
    if MOONCAKE in arguments.columns and (reason := missing()) is not None:
        progress(f"nothing is measured: {MOONCAKE}: {reason}")
        return 1
    document: Document = {
        "machine": machine(),
        "shape": arguments.shape,
        "workload": asdict(WORKLOADS[arguments.shape]),
        "gpus": find_gpus(),
        "columns": {},
    }
    problems = []
    with (
        sharing_environment(),
        Master(starts=False) as master,
        tempfile.TemporaryDirectory(prefix="bench-pool-", dir=arguments.pool_path) as folder,
    ):
        try:
            run(arguments, document, Path(folder), master)
        except KeyboardInterrupt:
            problems.append("stopped before the end")
    print(table(document, "replicas"))
    problems += unproven(document)
    for problem in problems:
        progress(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # sent by time limits
    sys.exit(main())
