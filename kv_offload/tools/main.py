"""`kv-offload`: its parser. Each subcommand is a module with `add_command`, which sets `run`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from kv_offload import __version__
from kv_offload.errors import KVOffloadError
from kv_offload.tools.output import run_quietly


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 2, with a message, for what the user can mend.

    Raises:
        SystemExit: from argparse, for `--help`, `--version` and arguments that it refuses.
    """
    return run_quietly(functools.partial(_run, argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-offload",
        description="A second, larger KV cache in host memory for vLLM engines.",
        epilog="`kv-offload COMMAND --help` says more. The exit status is 0 if all is well, 1 if "
        "doctor or tier found a problem, and 2, with a message, if an argument, a file or a server "
        "is wrong.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Here and not above: loading them takes long enough for a Ctrl-C.
    from kv_offload.tools import config, simulate
    from kv_offload.tools.doctor import command as doctor
    from kv_offload.tools.sizing import command as size
    from kv_offload.tools.status import command as status
    from kv_offload.tools.tier import command as tier

    for command in (config, doctor, simulate, size, status, tier):
        command.add_command(subcommands)
    arguments = parser.parse_args(argv)
    try:
        exit_status: int = arguments.run(arguments)
    except KVOffloadError as error:
        print(error, file=sys.stderr)
        return 2
    return exit_status
