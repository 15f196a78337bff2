"""`kv-offload status`: what the metrics of a running server say, live in a terminal."""

from __future__ import annotations

import argparse
import json
import signal
import time
from types import FrameType

from rich.console import Console
from rich.live import Live

from kv_offload.errors import ServerError
from kv_offload.tools.output import draw, is_terminal, make_console
from kv_offload.tools.status.figures import Figures
from kv_offload.tools.status.read import Reading, metrics_url, read
from kv_offload.tools.status.view import page

INTERVAL_SECONDS = 2.0
LONGEST_INTERVAL_SECONDS = 86400.0


def add_command(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kv-offload status URL`."""
    parser = subcommands.add_parser(
        "status",
        help="show what a running server's metrics say",
        description="Read the metrics of a running vLLM server and show them, again and again "
        "until Ctrl-C: hit rates, copies, the pool, what was not stored and why, what waits, "
        "errors. Without a terminal one page is printed. The exit status is 2 if there is no "
        "server or it has no metrics of kv-offload, else 0.",
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
    parser.add_argument("--json", action="store_true", help="print one reading as JSON and end")
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


def _run(arguments: argparse.Namespace) -> int:
    url = metrics_url(arguments.url)
    reading = read(url)
    if arguments.json:
        by_engine = {
            engine: Figures(reading, None, [engine]).as_json() for engine in reading.engines
        }
        print(json.dumps({**Figures(reading).as_json(), "by_engine": by_engine}, indent=2))
        return 0
    console = make_console()
    if arguments.once or not is_terminal():
        draw(console, page(url, reading))
    else:
        _watch(console, url, reading, arguments.interval)
    return 0


def _watch(console: Console, url: str, reading: Reading, interval: float) -> None:
    """Show a page every `interval` seconds until Ctrl-C or SIGTERM; the last one stays."""
    shown = page(url, reading)
    stopped_by: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped_by.append(number)  # Python drops an exception that meets a destructor, and goes on
        raise KeyboardInterrupt

    outer = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN  # as in a script's background
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
