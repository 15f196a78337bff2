"""`kv-offload tier PATH`: what the folder of a disk holds, and whether it is as it was written."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from kv_swap.tiers.record import Verdict
from rich.console import Console
from rich.progress import Progress

from kv_offload.tools.tier.read import Replica, read_folder, verify_rank
from kv_offload.tools.tier.view import Verified, as_json, as_text, is_harmed


def add_command(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kv-offload tier PATH`."""
    parser = subcommands.add_parser(
        "tier",
        help="show what the folder of a disk holds, and verify it",
        description="Show what the folder of a disk holds: model, slots, sizes, last use, and "
        "whether an engine uses it. An engine may go on meanwhile. The exit status is 1 if "
        "--verify found damage on a disk that no engine uses, 2 if there is nothing of "
        "kv-offload's, else 0.",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="the disk_path of an engine")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every block that the index knows, and compare it with its checksum; what an "
        "engine writes at that moment looks damaged",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    replicas = read_folder(arguments.path)
    verified = [_verify(replica) if arguments.verify else None for replica in replicas]
    shown = list(zip(replicas, verified, strict=True))
    if arguments.json:
        print(json.dumps([as_json(*one) for one in shown], indent=2))
    else:
        print("\n\n".join(as_text(*one) for one in shown))
    return int(any(counts and is_harmed(replica, counts) for replica, counts in shown))


def _verify(replica: Replica) -> Verified:
    """Read all blocks of a replica, with progress on a terminal; count what the records are."""
    counts: dict[int, Counter[Verdict]] = {}
    with Progress(
        console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        for file in replica.ranks:
            used = 0 if replica.index is None else len(replica.index.slots)
            task = progress.add_task(file.path.name, total=used)
            counts[file.rank] = Counter()
            for verdict in verify_rank(replica, file):
                counts[file.rank][verdict] += 1
                progress.advance(task)
    return counts
