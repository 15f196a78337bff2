"""The parser of `kv-offload`. Each subcommand's module has `add_arguments`, which sets `run`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Sequence

from kv_offload import __version__
from kv_offload.errors import KVOffloadError
from kv_offload.tools.output import run_quietly, write

COMMANDS = {
    "config": ("config", "check a configuration and print it with the argument for vLLM"),
    "doctor": ("doctor.command", "check this machine, its versions and a configuration"),
    "pool": ("pool", "list host pools, or free one that no engine uses"),
    "simulate": ("simulate", "estimate hits of host memory from a recorded trace"),
    "size": ("sizing.command", "show how much host memory a model's tokens take"),
    "status": ("status.command", "show or check the metrics of a running server"),
    "tier": ("tier.command", "show what the folder of a disk holds"),
}
"""Subcommands by name: the module in `kv_offload.tools`, and the description for `--help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 2, with a message, for a user's error.

    Raises:
        SystemExit: from argparse, for `--help`, `--version` and arguments that it refuses.
    """
    return run_quietly(functools.partial(_run, sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    completes = "_ARGCOMPLETE" in os.environ
    parser = _make_parser(os.environ.get("COMP_LINE", "").split() if completes else argv)
    if completes:
        with contextlib.suppress(ImportError):  # the extra `completion` is not installed
            import argcomplete

            argcomplete.autocomplete(parser)
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    try:
        report = arguments.run(arguments)
    except KVOffloadError as error:
        for problem in error.args:
            print(type(error)(problem), file=sys.stderr)
        return 2
    write(report, as_json=arguments.json)
    return int(report.exit_status)


def _make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser. Only subcommands in `words` get arguments.

    Loading all of them would take half a second, long enough for a Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="kv-offload",
        description="A second, larger KV cache in host memory for vLLM engines.",
        epilog="`kv-offload COMMAND --help` says more. The exit status is 0 if all is well; 1 if "
        "doctor, tier or status --check found a problem; 2, with a message, if an argument, a "
        "file or a server is wrong.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND")
    for name, (module, line) in COMMANDS.items():
        subparser = subcommands.add_parser(name, help=line)
        if name in words:
            importlib.import_module(f"kv_offload.tools.{module}").add_arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser
