"""Writes reports to standard output, as pages or JSON, and handles output errors."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The shell's exit status for a tool whose reader closed the pipe, as in `... | head -1`."""
INTERRUPTED = 128 + signal.SIGINT
"""The shell's exit status for a tool that Ctrl-C interrupted."""

COLUMNS = 80
"""Width of wrapped text, and of tables that do not go to a terminal."""

UNWRAPPED = 1 << 20
"""Width of fields with paths, which stay on one line so that they can be copied."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Report:
    """A command's result."""

    data: Any
    """For `--json`."""
    page: str | RenderableType | None
    """For people; None if it has already been shown."""
    exit_status: int = 0


def write(report: Report, *, as_json: bool) -> None:
    """Print a report."""
    if as_json:
        print(json.dumps(report.data, indent=2, default=str))
    elif isinstance(report.page, str):
        print(report.page)
    elif report.page is not None:
        draw(make_console(), report.page)


def as_fields(rows: Iterable[tuple[str, str]], indent: str = "", columns: int = COLUMNS) -> str:
    """Return names with their wrapped values, one below the other, for a terminal.

    Replaces control characters by `?`: values may come from a file.
    """
    rows = [*rows]
    width = len(indent) + max(len(name) for name, _ in rows) + 2
    lines = [
        textwrap.fill(f"{indent + name:<{width}}{value}", columns, subsequent_indent=" " * width)
        for name, value in rows
    ]
    return "\n".join(map(printable, "\n".join(lines).splitlines()))


def printable(line: str) -> str:
    """Return a line with `?` for characters that could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def is_terminal() -> bool:
    """Return whether standard output is a terminal; other output gets no escape sequences."""
    return sys.stdout is not None and sys.stdout.isatty()  # None if the shell closed it


def shows_colour() -> bool:
    """Return whether text can be coloured or bold: on a terminal, unless `NO_COLOR` is set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def make_console() -> Console:
    """Return a console that draws pages on standard output."""
    from rich.console import Console  # imported late: loading takes long enough for a Ctrl-C

    # By default, rich obeys FORCE_COLOR for a pipe, and keeps bold text with NO_COLOR.
    return Console(
        force_terminal=is_terminal(),
        color_system="auto" if shows_colour() else None,
        width=None if is_terminal() else COLUMNS,
    )


def make_progress() -> Progress:
    """Return a progress bar on standard error, removed at the end; invisible without a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    hidden = sys.stderr is None or not sys.stderr.isatty()
    return Progress(console=Console(file=sys.stderr), transient=True, disable=hidden)


def make_table(*columns: str) -> Table:
    """Return a table of figures, with a header if `columns` has names."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(Text(column), justify="right", header_style="bold cyan")
    return table


def draw(console: Console, page: RenderableType) -> None:
    """Print a page. By default, rich exits the program if the pipe is closed."""
    with console.capture() as capture:
        console.print(page)
    print(capture.get(), end="")


def run_quietly(run: Callable[[], int]) -> int:
    """Return the exit status of `run`, or the one for Ctrl-C, a closed pipe or a full disk."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path or model name may have characters that a locale such as C lacks.
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
        # At exit, Python would try to flush the remaining output again, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return CLOSED_PIPE
        print(
            f"kv-offload: standard output cannot be written: {error}. Free space, or write "
            "elsewhere.",
            file=sys.stderr,
        )
        return 2
