"""Standard output: what it can show, and what happens where it cannot be written."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The exit status that a shell shows for a tool whose reader went away, as in `... | head -1`."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit status that a shell shows for a tool that Ctrl-C ended before it was done."""

PIPE_COLUMNS = 110
"""The width of a page that is written to no terminal."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_terminal() -> bool:
    """Return whether standard output is a terminal; other output has no escapes at all."""
    return sys.stdout is not None and sys.stdout.isatty()  # it is None where a shell has closed it


def shows_colour() -> bool:
    """Return whether text may have colours and weights: on a terminal, unless `NO_COLOR` is set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def make_console() -> Console:
    """Return what draws pages on standard output."""
    from rich.console import Console  # not above: loading it takes long enough for a Ctrl-C

    # Told, not left to rich: it would look at FORCE_COLOR for a pipe, and keep bold for NO_COLOR.
    return Console(
        force_terminal=is_terminal(),
        color_system="auto" if shows_colour() else None,
        width=None if is_terminal() else PIPE_COLUMNS,
    )


def make_table(*columns: str) -> Table:
    """Return a table of figures, with names above them if `columns` has any."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(Text(column), justify="right", header_style="bold cyan")
    return table


def draw(console: Console, page: RenderableType) -> None:
    """Print a page; rich itself would end the program at a closed pipe."""
    with console.capture() as capture:
        console.print(page)
    print(capture.get(), end="")


def run_quietly(run: Callable[[], int]) -> int:
    """Return the exit status of `run`, or that of Ctrl-C, a closed pipe or a full disk."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path or a model's name may have letters that a locale such as C lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return run()
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, *NO_ROOM):
            raise
        # Python tries once more when it ends to write what is still to be written, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return CLOSED_PIPE
        print(
            f"kv-offload: standard output cannot be written: {error}. Free space, or write "
            "elsewhere.",
            file=sys.stderr,
        )
        return 2
