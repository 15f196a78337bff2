"""A real engine without offloading, with this project, and with vLLM's own connectors.

usage: python -m bench.serving [--shape small|small-mla|gqa8|mqa|mla] [--out FOLDER]
                               [--connectors off,kv-offload,kv-offload-packed,vllm,vllm-simple]
                               [--sections ttft,throughput,latency,pairs,conversations,start]
                               [--options JSON] [--tensor-parallel RANKS] [--rounds ROUNDS]

This project gets `{"eviction_policy": "lru"}`, or the options that are named; `kv-offload-packed`
gets `"pack_kv": true` besides.

Every connector gets an engine in a process of its own: the same shape with random weights, the same
prompts, the same GPU cache, as much host memory. docs/benchmarks/serving.md explains every figure.

    ttft        time to first token of prompts that are computed, and of the same prompts repeated
    throughput  many prompts at once at 0, 50 and 100 % hits
    latency     time from token to token of running decodes: alone, while others' prompts are
                computed and stored, and while they are loaded
    pairs       throughput at 0 % hits of `off` and `kv-offload`, by turns, with its 95 % interval
    conversations  users who come back with longer prompts, 16 at a time: time to first token, and
                from token to token; with an engine whose GPU cache holds everything, by turns
                of as many ROUNDS
    start       engines started five times more, by turns, now that all is compiled; only if named

Every answer of an engine is written at once. A run that is stopped, by a time limit or by Ctrl-C,
shows what it has and says what is missing. The exit status is 1 then, if an engine with this
project or without offloading failed, and if this project did not load exactly the bytes that it
had to.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.serving.process import progress
from bench.serving.report import save, tables, unproven
from bench.serving.runs import ROUNDS, SECTIONS, Bench
from bench.serving.settings import CONNECTORS, NO_PEERS
from bench.serving.shapes import SHAPES

KEEP_LAST = {"eviction_policy": "lru"}
"""What fits into host memory is to hit, as with vLLM's connectors. `auto` would keep the repeated
prompts of one section from the new ones of the next."""


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of a list with commas, each of whose words is one of `allowed`."""

    def split(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(allowed):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(allowed)}"
            )
        return chosen

    return split


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--connectors", type=names(tuple(CONNECTORS)), default=["off", "kv-offload"]
    )
    parser.add_argument("--sections", type=names(SECTIONS), default=list(SECTIONS[:-1]))
    parser.add_argument("--options", type=json.loads, default=KEEP_LAST, help="for this project")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of every engine")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of conversations")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the result, serving-SHAPE.json or serving-SHAPE-tp2.json",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and return the exit status."""
    arguments = parse(words)
    problems = []
    with tempfile.TemporaryDirectory() as model:
        bench = Bench(arguments, model)
        try:
            bench.run()
        except KeyboardInterrupt:
            problems.append("stopped before the end")
    document = bench.document()
    print(tables(document))
    if arguments.out:
        progress(f"wrote {save(document, arguments.out)}")
    problems += unproven(document)
    problems += [
        bench.results[name]["error"] for name in NO_PEERS if "error" in bench.results.get(name, {})
    ]
    for problem in problems:
        progress(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what time limits send
    sys.exit(main())
