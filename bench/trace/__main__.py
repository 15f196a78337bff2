"""`python -m bench.trace TRACE`: hit ratios by policy and capacity, as a table and a plot.

A trace has one request per line: timestamp in ms, input_length and output_length in tokens, and
hash_ids, which prompts share as far as they share a prefix. Mooncake's FAST'25 traces have this
format: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from bench.machine import keep_rows
from bench.trace.plot import as_svg
from bench.trace.table import ROWS, as_markdown, measure
from kv_offload.simulation.trace import read_trace


def main() -> None:
    """Print the table; write it and the plot to files if requested."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="a file of JSON lines")
    parser.add_argument(
        "--capacities",
        default="1000,2500,5000,10000,20000,40000",
        help="in blocks of the trace, with commas",
    )
    parser.add_argument("--policies", help="of: " + "; ".join(ROWS) + ". With semicolons")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument(
        "--keep", help="name of the results in the folder that KV_OFFLOAD_BENCH_RESULTS names"
    )
    arguments = parser.parse_args()
    requests = list(read_trace(arguments.trace))
    capacities = [int(number) for number in arguments.capacities.split(",")]
    names = arguments.policies.split(";") if arguments.policies else list(ROWS)
    rows = list(measure(requests, names, capacities))
    name = arguments.trace.name
    blocks = sum(len(request.hash_ids) for request in requests)
    what = f"{name}: {len(requests):,} requests, {blocks:,} blocks; hits in % of blocks"
    print(as_markdown(rows, what))
    if arguments.plot:
        arguments.plot.write_text(as_svg(rows, f"Hits of {name}, by capacity in blocks"))
    if arguments.keep:
        kept = [asdict(row) for row in rows]
        keep_rows(arguments.keep, kept, trace=name, requests=len(requests), blocks=blocks)


if __name__ == "__main__":
    main()
