"""Arguments shared by several subcommands."""

from __future__ import annotations

import argparse
from pathlib import Path

from kv_offload.config.trace import FILE_VARIABLE


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the optional path of the configuration file."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help=f"YAML file (default: the file named by {FILE_VARIABLE}, if any)",
    )


def add_count(
    parser: argparse.ArgumentParser, *names: str, of: str, metavar: str = "N", default: int = 1
) -> None:
    """Add an option whose value is an integer of at least 1."""
    parser.add_argument(
        *names, type=_count, default=default, metavar=metavar, help=f"{of} (default: %(default)s)"
    )


def path(text: str) -> Path:
    """Return a path; refuse an empty one, which comes from an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: write . for the folder here")
    return Path(text)


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return count
