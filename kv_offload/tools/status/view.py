"""Draws figures on a page, which fits 24 lines of 80 columns for a healthy engine with a disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kv_offload.config.sizes import format_size
from kv_offload.tools.output import COLUMNS, make_table
from kv_offload.tools.status.figures import ERRORS, WAITS, Figures
from kv_offload.tools.status.read import Reading

NARROW = 60
"""Below this width, columns such as rates are omitted, so that other figures stay whole."""


def page(
    url: str, now: Reading, before: Reading | None = None, note: str = "", *, width: int = COLUMNS
) -> RenderableType:
    """Return the page: a note, all engines together, and each engine if there are several.

    Problems come first, because a small terminal shows only the top of a page.
    """
    count, figures = len(now.engines), Figures(now, before)
    engines = f"engine {now.engines[0]}" if count == 1 else f"{count} engines together"
    title = Text.assemble(("kv-offload", "bold"), f" at {url}: {now.model}, {engines}")
    wrong = [Text(line, style="bold red") for line in ([note] if note else []) + [*_wrong(figures)]]
    shown = wrong or [Text("Errors: none since the start", style="green")]
    is_narrow = width < NARROW
    table = _table(figures, is_narrow=is_narrow)
    parts: list[RenderableType] = [title, *shown, table, *map(Text, _lines(figures))]
    if count > 1:
        by_engine = [Figures(now, before, [engine]) for engine in now.engines]
        parts.append(_engines(by_engine, is_narrow=is_narrow))
    return Group(*parts)


def _wrong(figures: Figures) -> Iterator[str]:
    """Yield a line for each problem that needs an operator's attention."""
    values = figures.values
    if errors := _listed(figures.some(*ERRORS)):
        yield f"Errors: {errors}"
    if alone := values["tiers_left_alone"]:
        by = "" if len(figures.engines) == 1 else f" by {_number(alone)} of the engines"
        yield f"The lower tier is not read{by}, after an error or while a copy hangs"
    if bad := values["tier_mismatches"]:
        yield f"Slots of the lower tier that were not what was written: {_number(bad)}"
    if aside := values["tier_slots_set_aside"]:
        yield f"Slots of the disk that could not be written or read: {_number(aside)}"
    if paused := values["stores_paused"]:
        yield f"Nothing is stored: engines that paused stores: {_number(paused)}"


def _lines(figures: Figures) -> Iterator[str]:
    """Yield lines about blocks that were not stored, and about waiting work."""
    yield f"Not stored, in slots: {_listed(figures.skipped) or 'nothing'}"
    waiting = [f"{_number(n)} {WAITS[name]}" for name, n in figures.some(*WAITS).items() if n]
    if age := figures.values["oldest_copy_seconds"]:
        waiting.append(f"oldest copy {_time(age)}")
    yield f"Waiting now: {', '.join(waiting) or 'nothing'}"


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items() if value)


def _table(figures: Figures, *, is_narrow: bool) -> Table:
    table, seconds, values = make_table(), figures.seconds, figures.values
    table.add_column("")  # in a narrow terminal names wrap, and figures stay whole
    headings = ["since start", "share", "" if seconds is None else f"last {seconds:.1f} s"]
    for heading in headings[:2] if is_narrow else headings:
        table.add_column(heading, justify="right", no_wrap=True)

    def add(*cells: RenderableType, style: str = "") -> None:
        table.add_row(*cells[: len(table.columns)], style=style)

    def row(text: str, name: str, whole: str = "", style: str = "") -> None:
        share = _share(values[name], values[whole]) if whole else ""
        growth = figures.per_second(name)
        rate = "" if growth is None else f"{_number(growth)}/s"
        add(text, _number(values[name]), share, rate, style=style)

    row("Prompt tokens", "prompt_tokens")
    row("  from the GPU's own cache", "gpu_tokens", "prompt_tokens")
    row("  from host memory: not computed", "host_tokens", "prompt_tokens", "green")
    row("  computed", "computed_tokens", "prompt_tokens")
    row("Tokens looked up in host memory", "lookup_tokens")
    row("  loaded: the hit rate", "host_tokens", "lookup_tokens", "green")
    row("  found, but faster to compute", "recomputed_tokens", "lookup_tokens")
    if any(figures.at_other_sizes.values()):
        sizes = (figures.at_other_sizes[name] for name in ("half", "twice", "four_times"))
        half, twice, four = (_share(tokens, values["lookup_tokens"]) for tokens in sizes)
        add("  at half, 2 x, 4 x the size", half, twice, four)
        if is_narrow:
            add("", four)
    add(*_traffic("Copies to host memory", figures, "stored"))
    add(*_traffic("Copies from host memory", figures, "loaded"))
    median, slowest = figures.load_seconds(0.5), figures.load_seconds(0.99)
    if median is not None and slowest is not None:
        gap = () if is_narrow else ("",)
        add("  time of a load: median, 99 %", _time(median), *gap, _time(slowest))
    add(*_use("Host memory", figures, "slots_in_use", "pool_slots"))
    if values["slots"] < values["pool_slots"]:
        ready = _share(values["slots"], values["pool_slots"])
        add("  ready; more is page-locked", "", ready, style="yellow")
    row("  slots stored", "stored_slots")
    row("  slots given to another block", "evictions")
    if values["tier_slots"]:
        add(*_use("Disk", figures, "tier_slots_in_use", "tier_slots"))
    below = {"Disk": values["tier_slots"], "Remote store": values["has_remote"]}
    if found := [name for name, is_there in below.items() if is_there]:
        name = found[0] if len(found) == 1 else "Lower tiers"
        add(*_traffic(f"{name}: read", figures, "promoted"))
        add(*_traffic(f"{name}: written", figures, "demoted"))
    return table


def _use(what: str, figures: Figures, in_use: str, slots: str) -> Sequence[RenderableType]:
    used, total = figures.values[in_use], figures.values[slots]
    used_size, size = (
        format_size(int(number * figures.values["slot_bytes"])) for number in (used, total)
    )
    bar = ProgressBar(total=max(1.0, total), completed=used, width=12)
    return f"{what}, {size} a rank", used_size, _share(used, total), bar


def _engines(by_engine: Sequence[Figures], *, is_narrow: bool) -> Table:
    columns = {"tokens loaded": "host_tokens", "slots in use": "slots_in_use", "of": "pool_slots"}
    if is_narrow:
        columns = {"tokens loaded": "host_tokens"}
    table = make_table("engine", "hit rate", *columns, "errors")
    for figures in by_engine:
        values = figures.values
        table.add_row(
            *map(Text, figures.engines),  # rich would parse plain strings as markup
            _share(values["host_tokens"], values["lookup_tokens"]),
            *(_number(values[name]) for name in (*columns.values(), "errors")),
            style="bold red" if values["errors"] else "",
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _traffic(what: str, figures: Figures, copies: str) -> tuple[str, str, str, str]:
    speed, growth = figures.copy_rate(copies), figures.per_second(f"{copies}_bytes")
    return (
        f"{what}, {format_size(int(speed))}/s" if speed else what,
        format_size(int(figures.values[f"{copies}_bytes"])),
        "",
        "" if growth is None else f"{format_size(int(growth))}/s",
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
