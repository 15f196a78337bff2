"""`kv-offload status`: a running server's metrics, live or judged for probes."""

from __future__ import annotations

import argparse
import math
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType

from rich.console import Console
from rich.live import Live

from kv_offload.errors import ServerError
from kv_offload.tools.output import Report, is_terminal, make_console
from kv_offload.tools.status.figures import Figures
from kv_offload.tools.status.read import Reading, metrics_url, read
from kv_offload.tools.status.view import page

INTERVAL_SECONDS = 2.0
LONGEST_INTERVAL_SECONDS = 86400.0

LIMITS: dict[str, tuple[str, float | None, str]] = {
    "--max-copy-seconds": ("oldest_copy_seconds", 60, "age of the oldest load or store"),
    "--max-unread-tiers": ("tiers_left_alone", 0, "engines that leave a disk or remote store out"),
    "--max-load-failures": ("load_failures", None, "loads that failed since the start"),
    "--max-lost-requests": ("lost_requests", None, "requests that a failed load ended"),
    "--max-errors": ("errors", None, "errors of every kind since the start"),
    "--max-paused-stores": ("stores_paused", None, "engines that paused stores"),
}
"""For each option: the figure, its default limit (None if not judged), and a description."""

HIT_RATIO = "--min-hit-ratio"
ENOUGH_TOKENS = 100_000
"""Minimum number of looked-up tokens before the hit ratio is judged: a new server has no hits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload status URL`."""
    parser.description = (
        "Read the metrics of a running vLLM server and show them until Ctrl-C: hit rates, copies, "
        "the pool, slots that were not stored and why, what waits, errors. Prints a single page if "
        "the output is not a terminal. --check reads the metrics once and compares them with "
        "limits. The exit status is 1 if a limit of --check is violated, 2 if there is no server "
        "or it has no metrics of kv-offload, else 0."
    )
    parser.add_argument(
        "url", metavar="URL", help="the server: localhost:8000, or http://localhost:8000/metrics"
    )
    parser.add_argument(
        "--interval",
        type=partial(_number, least=0.1, most=LONGEST_INTERVAL_SECONDS),
        default=INTERVAL_SECONDS,
        metavar="SECONDS",
        help="time between two readings (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one page and exit")
    limits = parser.add_argument_group("limits of --check, each of which implies it")
    limits.add_argument("--check", action="store_true", help="exit with 1 if a limit is violated")
    for option, (_, default, description) in LIMITS.items():
        shown = "not judged" if default is None else f"{default:g}"
        text = f"{description} (default: {shown})"
        limits.add_argument(option, type=_number, metavar="N", help=text)
    limits.add_argument(
        HIT_RATIO,
        type=partial(_number, most=1.0),
        metavar="SHARE",
        help="minimum share of looked-up tokens that are loaded, such as 0.2; judged once "
        f"{ENOUGH_TOKENS:,} tokens were looked up (default: not judged)",
    )
    parser.set_defaults(run=_run)


def _number(text: str, least: float = 0.0, most: float = math.inf) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (least <= number <= most and math.isfinite(number)):
        bound = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {bound}")
    return number


def _run(arguments: argparse.Namespace) -> Report:
    url = metrics_url(arguments.url)
    reading = read(url)
    figures = Figures(reading)
    by_engine = {engine: Figures(reading, None, [engine]).as_json() for engine in reading.engines}
    data = {**figures.as_json(), "by_engine": by_engine}
    given = {option: _given(arguments, option) for option in (*LIMITS, HIT_RATIO)}
    if arguments.check or any(limit is not None for limit in given.values()):
        found = [*_problems(figures, given)]
        return Report({**data, "problems": found}, "\n".join(found or ["ok"]), int(bool(found)))
    console = make_console()
    if arguments.once or arguments.json or not is_terminal():
        return Report(data, page(url, reading, width=console.width))
    _watch(console, url, reading, arguments.interval)
    return Report(data, None)


def _given(arguments: argparse.Namespace, option: str) -> float | None:
    given: float | None = getattr(arguments, option.removeprefix("--").replace("-", "_"))
    return given


def _problems(figures: Figures, given: Mapping[str, float | None]) -> Iterator[str]:
    """Yield a line for each limit that is exceeded."""
    for option, (name, default, description) in LIMITS.items():
        limit = default if given[option] is None else given[option]
        value = figures.values[name]
        if limit is not None and value > limit:
            yield f"{description}: {value:,.10g}, more than {option} {limit:g}"
    least, ratio = given[HIT_RATIO], figures.hit_ratio
    if least is not None and figures.values["lookup_tokens"] >= ENOUGH_TOKENS and ratio < least:
        yield f"share of looked-up tokens that are loaded: {ratio:.3f}, less than {least:g}"


def _watch(console: Console, url: str, reading: Reading, interval: float) -> None:
    """Show a page every `interval` seconds until Ctrl-C or SIGTERM; the last one stays."""
    shown = page(url, reading, width=console.width)
    stopped_by: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped_by.append(number)  # an exception would be dropped inside a destructor
        raise KeyboardInterrupt

    outer = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN  # ignored in a script's background job
    }
    try:
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while not stopped_by:
                time.sleep(interval)
                try:
                    before, reading = reading, read(url)
                    shown = page(url, reading, before, width=console.width)
                except ServerError as error:
                    note = f"{error}. Shown is what was read before; trying again."
                    shown = page(url, reading, note=note, width=console.width)
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in outer.items():
            signal.signal(number, handler)
    console.print(shown)
