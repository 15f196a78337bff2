"""The command line, `kv-offload`: its parser, and what happens when a subcommand fails.

Each subcommand is a module with `add_command`, which adds its parser and sets `run` there.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

from kv_offload import __version__
from kv_offload.errors import KVOffloadError

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The exit status that a shell shows for a tool whose reader went away, as in `... | head -1`."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit status that a shell shows for a tool that Ctrl-C ended before it was done."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing to a full disk, or beyond a limit, fails with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 2, with a message, for what the user can mend.

    Raises:
        SystemExit: from argparse, for `--help`, `--version` and arguments that it refuses.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where a shell has closed it
        # A path or a model's name may have letters that a locale such as C lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _drop_output()
        print(
            f"kv-offload: standard output cannot be written: {error}. Free space, or write "
            "elsewhere.",
            file=sys.stderr,
        )
        return 2


def _drop_output() -> None:
    """Drop what is still to be written: Python tries it once more when it ends, and complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-offload",
        description="A second, larger KV cache in host memory for vLLM engines.",
        epilog="`kv-offload COMMAND --help` says more. The exit status is 0 if all is well, 1 if "
        "doctor found a problem, and 2, with a message, if an argument, a file or a server is "
        "wrong.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Here and not above: loading them takes long enough for a Ctrl-C.
    from kv_offload.tools import config
    from kv_offload.tools.doctor import command as doctor
    from kv_offload.tools.sizing import command as size
    from kv_offload.tools.status import command as status

    for command in (config, doctor, size, status):
        command.add_command(subcommands)
    arguments = parser.parse_args(argv)
    try:
        exit_status: int = arguments.run(arguments)
    except KVOffloadError as error:
        print(error, file=sys.stderr)
        return 2
    return exit_status
