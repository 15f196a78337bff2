"""`kv-offload pool`: list this user's host pools, and free their memory."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from kv_swap.memory.arena_file import find_arenas

from kv_offload.cache.directory import read_directory
from kv_offload.cache.peers import arena_kinds
from kv_offload.cache.seats import find_seats, seat_number
from kv_offload.config.schema import SCHEMA
from kv_offload.config.sizes import format_size
from kv_offload.errors import ConfigError
from kv_offload.tools.arguments import path
from kv_offload.tools.output import Report, make_table, printable
from kv_offload.worker.pool import ABOUT, About, free_seat, is_held, user_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload pool`."""
    parser.description = (
        "List the host pools (host_pool) of this user: the memory that each engine keeps there, "
        "whether it runs, and how many blocks the next one would take over. The exit status is 2 "
        "if a folder or pool does not exist or a pool cannot be removed, else 0."
    )
    parser.add_argument(
        "--path",
        type=path,
        default=Path(SCHEMA["host_pool_path"].default),
        help="the host_pool_path of the engines (default: %(default)s)",
    )
    parser.add_argument(
        "--remove",
        metavar="NAME",
        help="free the memory of engines of this pool that no longer run",
    )
    parser.set_defaults(run=_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatState:
    """The memory that one engine uses in a pool, or has left there."""

    pool: str
    seat: int
    pid: int | None
    """Process id of the engine's first rank, in its container; None if no engine is running."""
    started: float | None
    """Start of the running or last engine, in seconds since 1970."""
    model: str
    memory_bytes: int
    readable_slots: int
    slots: int
    peers: int
    """Number of the pool's other seats that can be read from this one."""


def _run(arguments: argparse.Namespace) -> Report:
    folder = user_folder(arguments.path)
    if not os.path.isdir(arguments.path):  # Path.is_dir raises for names that are too long
        raise ConfigError(
            f"{arguments.path}: there is no such folder. Give the host_pool_path of the engines"
        )
    try:
        if arguments.remove is not None:
            freed_bytes, page = _remove(folder, arguments.remove)
            return Report({"freed_bytes": freed_bytes}, page)
        states = [*_read(folder)]
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}. Look at it: a seat is a folder of this user with "
            "a file `lock`; remove what is not"
        ) from error
    data = [dataclasses.asdict(one) for one in states]
    if not states:
        return Report(data, f"no host pool of user {os.geteuid()} in {arguments.path}")
    table = make_table("pool", "seat", "engine", "memory", "readable slots", "peers", "model")
    for one in states:
        hours = max(0.0, time.time() - (one.started or time.time())) / 3600
        engine = f"ended, began {hours:.1f} h ago" if one.pid is None else f"runs, pid {one.pid}"
        readable = f"{one.readable_slots:,} of {one.slots:,}"
        memory, model = format_size(one.memory_bytes), printable(one.model)
        table.add_row(
            printable(one.pool), str(one.seat), engine, memory, readable, str(one.peers), model
        )
    return Report(data, table)


def _read(folder: Path) -> Iterator[SeatState]:
    kinds = {seat: arena_kinds(seat) for pool in _pools(folder) for seat in find_seats(pool)}
    for seat, kind in kinds.items():
        about = _about(seat)
        alike = [one for one in kinds if one.parent == seat.parent and kinds[one] == kind != {}]
        _, readable, slots = read_directory(seat) or ((), (), 0)
        memory_bytes, runs = sum(find_arenas(seat).values()), is_held(seat)
        if not (memory_bytes or runs):  # the memory was freed, but the folder and lock stay
            continue
        yield SeatState(
            pool=seat.parent.name,
            seat=seat_number(seat),
            pid=about.pid if runs else None,
            started=about.started,
            model=about.contents.get("model", ""),
            memory_bytes=memory_bytes,
            readable_slots=len(readable),
            slots=slots,
            peers=max(0, len(alike) - 1),
        )


def _pools(folder: Path) -> list[Path]:
    return [pool for pool in sorted(folder.iterdir()) if pool.is_dir()] if folder.is_dir() else []


def _about(seat: Path) -> About:
    try:
        return msgspec.json.decode((seat / ABOUT).read_bytes(), type=About)
    except (OSError, RecursionError, UnicodeDecodeError, msgspec.DecodeError):
        # An engine ended before writing it.
        return About()


def _remove(folder: Path, name: str) -> tuple[int, str]:
    """Free the memory of all seats without an engine; return the bytes freed and a sentence."""
    pools = {pool.name: pool for pool in _pools(folder)}
    if name not in pools:
        raise ConfigError(f"there is no pool {name!r} in {folder}: `kv-offload pool` lists them")
    freed, running = 0, 0
    for seat in find_seats(pools[name]):
        nbytes = free_seat(seat)
        running += nbytes is None
        freed += nbytes or 0
    if running and not freed:
        raise ConfigError(f"running engines of pool {name!r}: {running}. Stop them first")
    kept = f"; running engines keep theirs: {running}" if running else ""
    return freed, f"freed {format_size(freed)} of pool {name!r}{kept}"
