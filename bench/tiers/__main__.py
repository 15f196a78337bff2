"""Measures the cost and gain of a disk or remote store with real engines, one after the other.

usage: python -m bench.tiers [--shape small|gqa8|mqa] [--disk FOLDER] [--disk-bytes SIZE]
                             [--remote-bytes BYTES] [--out FOLDER]

The first and last engines have no tier; between them runs one with each requested tier: files in
FOLDER, or a store with BYTES of another process's memory on this machine. Blocks in a tier are
always read, even if computing would be faster, and all blocks are written to it: with `gqa8` about
33 GB, so give each tier 40 GiB.

The first table shows time to first token by the place that has the prompt, the second the
inter-token latency of decodes while blocks are moved. Results are written to tiers-SHAPE.json after
each engine. The exit status is 1 if an engine failed or did not read all that it had to.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.machine import machine, write_result
from bench.serving.process import EngineError, EngineProcess, progress
from bench.serving.report import markdown_table, shown_spread
from bench.serving.settings import OURS, EngineSettings
from bench.serving.shapes import SHAPES
from tests.support.mooncake import Master, Peer, environment, missing

NO_TIER = "no tier"
PLACES = ("computed", "host memory", "below")
PHASES = ("alone", "after computing", "loading", "reading")
RATE = "16GiB"
"""Allowed write rate per second: more than any tier can take."""
ALWAYS: dict[str, Any] = {"load_or_recompute": "always_load"}
"""The only other change to the defaults: prompts that are faster to compute are still read."""

Document = dict[str, Any]


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--disk-bytes", default="1GiB")
    parser.add_argument("--remote-bytes", type=int, help="bytes of memory of the remote store")
    parser.add_argument("--out", type=Path, help="folder for the result")
    return parser.parse_args(words)


def options(arguments: argparse.Namespace, master: str | None) -> dict[str, dict[str, Any]]:
    """Return the plugin's keys for each engine, in order."""
    found = {NO_TIER: ALWAYS}
    if arguments.disk:
        disk = {"path": str(arguments.disk), "bytes": arguments.disk_bytes, "write_rate": RATE}
        found["disk"] = {**ALWAYS, "disk": {**disk, "keep_on_restart": False}}
    if master:
        remote = {"kind": "mooncake", "address": master, "bytes": 0, "write_rate": RATE}
        found["remote"] = {**ALWAYS, "remote": remote}
    return {**found, f"{NO_TIER}, again": ALWAYS}


def measure(arguments: argparse.Namespace, master: str | None, document: Document) -> list[str]:
    """Measure each engine, add the answers to the document, and return the problems."""
    problems = []
    with tempfile.TemporaryDirectory() as model:
        for name, own in options(arguments, master).items():
            progress(f"{name}: starting an engine")
            process = EngineProcess(EngineSettings(SHAPES[arguments.shape], OURS, model, own))
            try:
                process.ask("start")
                document["results"][name] = process.ask("tiers")
            except EngineError as error:
                problems.append(f"{name}: {error}")
            process.close()
            if arguments.out:
                write_result(arguments.out / f"tiers-{arguments.shape}.json", document)
    return problems


def unproven(document: Document) -> list[str]:
    """Name the figures of prompts that were not completely read from a lower tier."""
    problems = [
        f"NOT PROVEN: {name}, {tokens} tokens: {found['bytes_read']:.0f} of "
        f"{found['bytes_needed']} bytes were read"
        for name, result in document["results"].items()
        for tokens, found in result["first_token"].items()
        if "below" in found and found["bytes_read"] < found["bytes_needed"]
    ]
    for name, result in document["results"].items():
        reading = result["decodes"].get("reading")
        if reading is not None and not reading["promoted_bytes"]:
            problems.append(f"NOT PROVEN: {name}, decodes while the tier is read: nothing was read")
    return problems


def tables(document: Document) -> str:
    """Return both tables as Markdown."""
    first, between = [], []
    for name, result in document["results"].items():
        for tokens, found in result["first_token"].items():
            cells = [shown_spread(found[p], 1e3, 1) if p in found else "-" for p in PLACES]
            first.append([name, f"{int(tokens):,}", *cells])
        cells = []
        for phase in PHASES:
            times = result["decodes"].get(phase, {}).get("between_tokens")
            cells.append(f"{1e3 * times['p50']:.1f} / {1e3 * times['p99']:.1f}" if times else "-")
        between.append([name, *cells])
    return "\n\n".join(
        (
            markdown_table(
                "How long until the first token? ms, median (range)",
                ["engine", "tokens", *PLACES],
                first,
            ),
            markdown_table(
                "How long from token to token of decodes? ms, p50 / p99",
                ["engine", *PHASES],
                between,
            ),
        )
    )


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, and return the exit status."""
    arguments = parse(words)
    document = new_document(arguments.shape)
    with contextlib.ExitStack() as ends:
        master = None
        if arguments.remote_bytes:
            if (reason := missing()) is not None:
                progress(f"no store is measured: {reason}")
                return 1
            master = ends.enter_context(with_mooncake())
            ends.enter_context(Peer(master, count=1, segment_bytes=arguments.remote_bytes))
        problems = measure(arguments, master, document)
    return conclude(tables(document), problems + unproven(document))


def new_document(shape: str) -> Document:
    """Return a document without measurements."""
    return {
        "machine": machine(),
        "shape": {"name": shape, **asdict(SHAPES[shape])},
        "results": {},
    }


def conclude(shown: str, problems: list[str]) -> int:
    """Print tables, then the problems, and return the exit status."""
    print(shown)
    for problem in problems:
        progress(problem)
    return 1 if problems else 0


@contextlib.contextmanager
def sharing_environment() -> Iterator[None]:
    """Make child processes compute the same keys and find Mooncake's libraries."""
    before = dict(os.environ)
    os.environ.update(environment(), PYTHONHASHSEED="0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def with_mooncake() -> Iterator[str]:
    """Run a master for engines that share keys, and yield its address."""
    with sharing_environment(), Master(lease_seconds=30) as master:
        yield master.address


if __name__ == "__main__":
    sys.exit(main())
