"""`kv-offload tier PATH`: show the contents of a disk's folder."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

from kv_offload.config.sizes import format_size
from kv_offload.tools.arguments import path
from kv_offload.tools.output import UNWRAPPED, Report, as_fields, printable
from kv_offload.tools.tier.read import RankFile, Replica, read_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload tier PATH`."""
    parser.description = (
        "Show what the folder of a disk holds: model, slots, sizes, last use, and whether an "
        "engine uses it. Safe while an engine uses it. The exit status is 1 if an index or a file "
        "is unusable or truncated; 2 if the folder holds nothing of kv-offload; else 0."
    )
    parser.add_argument("path", metavar="PATH", type=path, help="the disk.path of an engine")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Report:
    replicas = read_folder(arguments.path)
    page = "\n\n".join(
        f"{printable(str(replica.folder))}\n{as_fields(_lines(replica), '  ', UNWRAPPED)}"
        for replica in replicas
    )
    is_harmed = any(
        replica.problem or any(file.problem for file in replica.ranks) for replica in replicas
    )
    return Report([dataclasses.asdict(replica) for replica in replicas], page, int(is_harmed))


def _lines(replica: Replica) -> Iterator[tuple[str, str]]:
    in_use = {True: "by an engine", False: "by no engine", None: "not known"}[replica.in_use]
    yield "in use", in_use
    if replica.problem:
        yield "index", replica.problem
    elif replica.description is None or replica.slots is None:
        yield (
            "index",
            "none: a reset or new weights emptied the disk, or it was removed by hand; a restart "
            "begins empty",
        )
    else:
        yield "model", ", ".join(filter(None, map(replica.description.get, ("model", "dtype"))))
        used, slots = replica.used_slots, replica.slots
        yield "slots", f"{used:,} of {slots:,} hold a block, {100 * used / slots:.1f} %"
        yield "data", f"{format_size(replica.used_bytes)} in {len(replica.ranks)} files"
        if replica.last_use is not None and replica.first_use is not None:
            last, first = _ago(replica.last_use), _ago(replica.first_use)
            yield "last use", f"{last} ago; that of the next to go {first} ago"
    for file in replica.ranks:
        yield f"rank {file.rank}", file.problem or _describe(file, replica)


def _describe(file: RankFile, replica: Replica) -> str:
    size = f"{format_size(file.file_bytes)} in {file.file.name}"
    slots = f"slots of {format_size(file.slot_bytes or 0)}"
    if replica.slots is not None and not file.belongs_to_index:
        return f"{size}, {slots}; not the file that the index is of: nothing in it is found"
    return f"{size}, {slots}"


def _ago(moment: float) -> str:
    """Return the age of a moment, in the largest unit that fits."""
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
