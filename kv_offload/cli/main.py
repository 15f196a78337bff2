"""The command line, `kv-offload`: its parser, and what happens when a subcommand fails.

Each subcommand is a module with `add_command`, which adds its parser and sets `run` there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from kv_offload import __version__
from kv_offload.cli import config, doctor, size, status
from kv_offload.errors import KVOffloadError

COMMANDS = (config, doctor, size, status)
"""The modules of the subcommands, in the order of `kv-offload --help`."""

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The exit status that a shell shows for a tool whose reader went away, as in `... | head -1`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 2, with a message, for what the user can mend.

    Raises:
        SystemExit: from argparse, for `--help`, `--version` and arguments that it refuses.
    """
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        # Python flushes standard output once more when it ends, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-offload", description="A second, larger KV cache in host memory for vLLM engines."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_command(subcommands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KVOffloadError as error:
        print(error, file=sys.stderr)
        return 2
    return status
