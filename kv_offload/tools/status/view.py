"""Draws figures as a page for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kv_offload.config.sizes import format_size
from kv_offload.metrics import METRICS
from kv_offload.tools.output import make_table
from kv_offload.tools.status.figures import ERRORS, WAITS, Figures
from kv_offload.tools.status.read import Reading

_HELP = {metric.name: metric.documentation for metric in METRICS}
SIZES = {
    "half": "half as large",
    "same": "as it is: there, loaded or not",
    "twice": "twice as large",
    "four_times": "four times as large",
}
_SKIPPED = "Slots not stored because "


def page(url: str, now: Reading, before: Reading | None = None, note: str = "") -> RenderableType:
    """Return the page: a note, all engines together, and each one if there are several.

    What is wrong comes first: a low terminal shows the top.
    """
    count = len(now.engines)
    engines = f"engine {now.engines[0]}" if count == 1 else f"{count} engines together"
    title = Text.assemble(("kv-offload", "bold"), f" at {url}: {now.model}, {engines}")
    notes = [Text(note, style="bold red")] if note else []
    parts: list[RenderableType] = [title, *notes, _table(Figures(now, before))]
    if count > 1:
        parts.append(_engines([Figures(now, before, [engine]) for engine in now.engines]))
    return Group(*parts)


def _table(figures: Figures) -> Table:
    table = make_table()
    table.add_column("")
    table.add_column("since the start", justify="right")
    table.add_column("share", justify="right")
    seconds, values = figures.seconds, figures.values
    table.add_column("" if seconds is None else f"last {seconds:.1f} s", justify="right")

    def heading(text: str) -> None:
        table.add_row(Text(text, style="bold cyan"))

    def row(what: str, name: str, whole: str = "", style: str = "") -> None:
        share = _share(values[name], values[whole]) if whole else ""
        growth = figures.per_second(name)
        rate = "" if growth is None else f"{_number(growth)}/s"
        table.add_row(f"  {what}", _number(values[name]), share, rate, style=style)

    heading("Errors")
    for name, value in figures.some(*ERRORS).items():
        if value:
            table.add_row(f"  {name}: {_HELP[name]}", _number(value), style="bold red")
    if not any(figures.some(*ERRORS).values()):
        table.add_row("  none since the start", style="green")
    heading("Tokens of prompts")
    row("from the GPU's own cache", "gpu_tokens", "prompt_tokens")
    row("from host memory: not computed", "host_tokens", "prompt_tokens", "green")
    row("computed", "computed_tokens", "prompt_tokens")
    heading("Asked of host memory, in tokens")
    row("looked up", "lookup_tokens")
    row("loaded: the hit rate", "host_tokens", "lookup_tokens", "green")
    row("there, but sooner computed", "recomputed_tokens", "lookup_tokens")
    if any(figures.at_other_sizes.values()):
        heading("Hit rate with another host memory (estimate)")
        for size, what in SIZES.items():
            row(what, f"hit_tokens_at_{size}", "lookup_tokens", "green" if size == "same" else "")
    heading("Copies")
    table.add_row(*_traffic("to host memory", figures, "stored"))
    table.add_row(*_traffic("from host memory", figures, "loaded"))
    median, slowest = figures.load_seconds(0.5), figures.load_seconds(0.99)
    if median is not None and slowest is not None:
        table.add_row(f"  a load takes {_time(median)}, 99 %: {_time(slowest)}")
    heading("Host memory")
    _add_pool(table, figures)
    row("slots stored", "stored_slots")
    row("slots given to another block", "evictions")
    if values["tier_slots"] or values["has_remote"]:
        names = (("tier_slots", "Disk"), ("has_remote", "Remote store"))
        heading(" and ".join(name for gauge, name in names if values[gauge]).capitalize())
        _add_tier(table, figures)
    heading("Not stored, in slots")
    if paused := values["stores_paused"]:
        table.add_row("  nothing is stored: engines that paused stores", _number(paused))
    for name in (f"skipped_{reason}" for reason, count in figures.skipped.items() if count):
        row(_HELP[name].removeprefix(_SKIPPED).rstrip("."), name)
    if not paused and not any(figures.skipped.values()):
        table.add_row("  nothing")
    heading("Waiting now")
    waiting = {name: value for name, value in figures.some(*WAITS).items() if value}
    for name, value in waiting.items():
        table.add_row(f"  {WAITS[name]}", _number(value))
    if age := values["oldest_copy_seconds"]:
        table.add_row("  age of the oldest load or store", _time(age))
    elif not waiting:
        table.add_row("  nothing")
    return table


def _add_use(table: Table, figures: Figures, in_use: float, all_slots: float) -> None:
    slot_bytes = figures.values["slot_bytes"]
    used, slots = (format_size(int(n * slot_bytes)) for n in (in_use, all_slots))
    rank = "on one rank" if len(figures.engines) == 1 else "on one rank of each engine"
    table.add_row(
        f"  in use: {used} of {slots} {rank}",
        f"{_number(in_use)} slots",
        _share(in_use, all_slots),
        ProgressBar(total=max(1.0, all_slots), completed=in_use, width=12),
    )


def _add_tier(table: Table, figures: Figures) -> None:
    values = figures.values
    if alone := values["tiers_left_alone"]:
        one = len(figures.engines) == 1
        what = "not read" if one else f"not read by {_number(alone)} of the engines"
        table.add_row(f"  {what}, after an error or while a copy hangs", style="bold red")
    if values["tier_slots"]:
        _add_use(table, figures, values["tier_slots_in_use"], values["tier_slots"])
    table.add_row(*_traffic("read from it", figures, "promoted"))
    table.add_row(*_traffic("written to it", figures, "demoted"))
    if bad := values["tier_mismatches"]:
        table.add_row("  slots that were not what was written", _number(bad), style="yellow")
    if aside := values["tier_slots_set_aside"]:
        what = "  slots set aside, which could not be written or read"
        table.add_row(what, f"{_number(aside)} slots", style="yellow")


def _add_pool(table: Table, figures: Figures) -> None:
    values = figures.values
    ready, all_slots = values["slots"], values["pool_slots"]
    _add_use(table, figures, values["slots_in_use"], all_slots)
    if ready < all_slots:
        table.add_row(
            "  ready; the rest is being page-locked (as of the last step)",
            f"{_number(ready)} slots",
            _share(ready, all_slots),
            style="yellow",
        )


def _engines(by_engine: Sequence[Figures]) -> Table:
    table = make_table(
        *("engine", "hit rate", "tokens from host memory", "slots in use", "of", "errors")
    )
    for figures in by_engine:
        errors, values = sum(figures.some(*ERRORS).values()), figures.values
        table.add_row(
            *map(Text, figures.engines),  # plain strings would be read as markup
            _share(values["host_tokens"], values["lookup_tokens"]),
            *(_number(values[name]) for name in ("host_tokens", "slots_in_use", "pool_slots")),
            _number(errors),
            style="bold red" if errors else "",
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _traffic(what: str, figures: Figures, copies: str) -> tuple[str, str, str, str]:
    speed, growth = figures.copy_rate(copies), figures.per_second(f"{copies}_bytes")
    return (
        f"  {what}, at {format_size(int(speed))}/s" if speed else f"  {what}",
        format_size(int(figures.values[f"{copies}_bytes"])),
        "",
        "" if growth is None else f"{format_size(int(growth))}/s",
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
