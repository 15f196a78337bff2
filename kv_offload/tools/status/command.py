"""`kv-offload status`: the metrics of a running server, live or judged for probes."""

from __future__ import annotations

import argparse
import signal
import time
from types import FrameType

from rich.console import Console
from rich.live import Live

from kv_offload.errors import ServerError
from kv_offload.tools.output import Report, is_terminal, make_console
from kv_offload.tools.status import check
from kv_offload.tools.status.figures import Figures
from kv_offload.tools.status.read import Reading, metrics_url, read
from kv_offload.tools.status.view import page

INTERVAL_SECONDS = 2.0
LONGEST_INTERVAL_SECONDS = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload status URL`."""
    parser.description = (
        "Read the metrics of a running vLLM server and show them until Ctrl-C: hit rates, copies, "
        "the pool, slots that were not stored and why, what waits, errors. Without a terminal one "
        "page is printed. With --check the figures are judged once. The exit status is 1 if a "
        "limit of --check is passed, 2 if there is no server or it has no metrics of kv-offload, "
        "else 0."
    )
    parser.add_argument(
        "url", metavar="URL", help="the server: localhost:8000, or http://localhost:8000/metrics"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=INTERVAL_SECONDS,
        metavar="SECONDS",
        help="time between two readings (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one page and end")
    check.add_limits(parser)
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= LONGEST_INTERVAL_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds between 0.1 and {LONGEST_INTERVAL_SECONDS:g}"
        )
    return seconds


def _run(arguments: argparse.Namespace) -> Report:
    url = metrics_url(arguments.url)
    reading = read(url)
    figures = Figures(reading)
    by_engine = {engine: Figures(reading, None, [engine]).as_json() for engine in reading.engines}
    data = {**figures.as_json(), "by_engine": by_engine}
    if check.is_asked_for(arguments):
        found = [*check.problems(figures, arguments)]
        return Report({**data, "problems": found}, "\n".join(found or ["ok"]), int(bool(found)))
    if arguments.once or arguments.json or not is_terminal():
        return Report(data, page(url, reading))
    _watch(make_console(), url, reading, arguments.interval)
    return Report(data, None)


def _watch(console: Console, url: str, reading: Reading, interval: float) -> None:
    """Show a page every `interval` seconds until Ctrl-C or SIGTERM; the last one stays."""
    shown = page(url, reading)
    stopped_by: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped_by.append(number)  # an exception would be dropped inside a destructor
        raise KeyboardInterrupt

    outer = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN  # as in a script's background job
    }
    try:
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while not stopped_by:
                time.sleep(interval)
                try:
                    before, reading = reading, read(url)
                    shown = page(url, reading, before)
                except ServerError as error:
                    note = f"{error}. Shown is what was read before; trying again."
                    shown = page(url, reading, note=note)
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in outer.items():
            signal.signal(number, handler)
    console.print(shown)
