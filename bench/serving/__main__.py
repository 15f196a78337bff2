"""Compares real engines without offloading, with this project, and with vLLM's own connector.

usage: python -m bench.serving [--shape small|gqa8|mqa] [--out FILE.json] [--rounds ROUNDS]
                               [--columns off,vllm,kv-offload,kv-offload-lru,kv-offload-packed,
                                         gpu-cache]
                               [--once COLUMNS]
                               [--sections throughput,ttft,decodes]

`kv-offload` is the default configuration: only `cpu_bytes` is set. `kv-offload-lru` adds
`"eviction_policy": "lru"`, `kv-offload-packed` adds `"pack_kv": true`, and `vllm` is vLLM's
OffloadingConnector. In each round every column gets an engine in a new process, with the same shape
and random weights, the same prompts, the same GPU cache and the same host memory. Columns named by
`--once` run only in the first round. `gpu-cache` runs without offloading, with a GPU cache that
keeps every prompt: no copy can be faster than this. docs/benchmarks/serving.md explains every
figure.

    throughput  many prompts at once, of which host memory has nothing, all, or half, after other
                prompts that were sent twice
    ttft        time to first token of prompts that are computed, and of the same prompts repeated
    decodes     time from token to token of running decodes: alone, while others' prompts are
                computed and stored, and while they are loaded

Every answer of an engine is written at once. A run that is stopped, by a time limit or Ctrl-C,
shows its results so far and lists the missing ones. The exit status is 1 if the run was stopped, if
an engine with this project or without offloading failed, or if this project did not load all the
bytes that it had to.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import names
from bench.serving.process import progress
from bench.serving.report import save, tables, unproven
from bench.serving.runs import SECTIONS, Bench
from bench.serving.settings import COLUMNS, OFF, OURS, PEER
from bench.serving.shapes import SHAPES
from kv_offload.tools.arguments import add_count


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--columns", type=names(COLUMNS), default=[OFF, OURS])
    parser.add_argument("--once", type=names(COLUMNS), default=[])
    parser.add_argument("--sections", type=names(SECTIONS), default=list(SECTIONS))
    add_count(parser, "--rounds", of="engines of each column")
    parser.add_argument("--out", type=Path, help="file for the result")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and return the exit status."""
    arguments = parse(words)
    problems = []
    # vLLM finds its compiled code by the model's path, even in a later run.
    model = Path(tempfile.gettempdir()) / f"bench-serving-{arguments.shape}"
    bench = Bench(arguments, str(model))
    try:
        bench.run()
    except KeyboardInterrupt:
        problems.append("stopped before the end")
    document = bench.document()
    print(tables(document))
    if arguments.out:
        save(document, arguments.out)
        progress(f"wrote {arguments.out}")
    problems += unproven(document)
    problems += [
        one["error"]
        for column, rounds in bench.results.items()
        for one in rounds
        if column != PEER and "error" in one
    ]
    for problem in problems:
        progress(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # sent by time limits
    sys.exit(main())
