"""Tables and files of the serving bench.

usage: python -m bench.serving.report FILE.json    prints the tables of a result as Markdown
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.links import table as links_table
from bench.machine import write_result
from bench.serving.settings import NO_PEERS, OURS, PLUGINS
from bench.serving.shapes import SHAPES, Shape

Document = dict[str, Any]
Found = dict[str, Any]
PHASE_NAMES = {
    "alone": "alone",
    "storing": "while prompts are computed and stored",
    "loading": "while prompts are loaded",
}
MIB = 1 << 20


def tables(document: Document) -> str:
    """Return everything that was measured as Markdown, one table a question."""
    results: dict[str, Any] = document["results"]
    parts = [_heading(document)]
    for section, table in TABLES:
        found = {name: result[section] for name, result in results.items() if section in result}
        parts.append(table(document, found) if found else "")
    host = document.get("host") or {}
    if rates := host.get("rates"):
        parts.append(f"**What does each GPU's link carry? GB/s, by GPUs**\n\n{links_table(rates)}")
        parts.append(_links_of_hits(document, rates["load"]))
    if pairs := document["pairs"]:
        parts.append(
            f"**What does storing cost?** Throughput at 0 % hits, {OURS} / off, {pairs['pairs']} "
            f"pairs by turns: {pairs['ratio']:.4f}, 95 % interval {pairs['low']:.4f} to "
            f"{pairs['high']:.4f}"
        )
    notes = [f"- failed: {one['error']}" for one in (*results.values(), host) if "error" in one]
    peers = [name for name in results if name not in NO_PEERS]
    peers = [name for name in peers if "error" not in results[name]]
    if peers:
        notes.append(f"- not proven: that {' and '.join(peers)} loaded what it should have")
    if document.get("missing"):
        notes.append(f"- missing: {', '.join(document['missing'])}")
    parts.append("\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def save(document: Document, folder: Path) -> Path:
    """Write the result as JSON; return its path."""
    ranks = document["shape"]["tensor_parallel"]
    of_ranks = f"-tp{ranks}" if ranks > 1 else ""
    path = folder / f"serving-{document['shape']['name']}{of_ranks}.json"
    write_result(path, document)
    return path


def unproven(document: Document) -> list[str]:
    """Name every figure of this project whose loaded bytes are not those that were to be loaded."""
    problems = []
    for name in PLUGINS:
        for figure, load in _proofs(document["results"].get(name, {})):
            if not load["least_bytes"] <= load["loaded_bytes"] <= load["most_bytes"]:
                problems.append(
                    f"NOT PROVEN: {name}, {figure}: {load['loaded_bytes']} bytes were loaded, not "
                    f"{load['least_bytes']} to {load['most_bytes']}"
                )
    return problems


def _proofs(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, int]]]:
    for section in ("ttft", "throughput", "latency"):
        for name, measured in result.get(section, {}).items():
            for load in measured.get("loads", ()):
                yield f"{section} {name}", load
    for measured in result.get("conversations", ()):
        for load in measured["loads"]:
            yield "conversations", load


def floor_seconds(document: Document, tokens: int) -> float | None:
    """Return the least time for a repeated prompt: its bytes over the links and a decode step."""
    link = document["results"].get("off", {}).get("link")
    if not link or not link["bytes_per_second"]:
        return None
    shape = _shape(document)
    _, nbytes = shape.loadable_bytes(tokens, 2)
    own = nbytes / shape.tensor_parallel
    return float(own / link["bytes_per_second"] + link["decode_step"])


def _shape(document: Document) -> Shape:
    # Files of one rank from before there could be more do not say so.
    ranks = document["shape"].get("tensor_parallel", 1)
    return SHAPES[document["shape"]["name"]].on_ranks(ranks)


# -- tables ------------------------------------------------------------------------------------


def markdown_table(question: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, under the question that it answers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    shown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"**{question}**\n\n{shown}"


def _heading(document: Document) -> str:
    machine = document["machine"]
    names = ("gpu", "driver", "platform", "vllm", "torch", "commit", "date")
    facts = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    if "gpu" not in machine:
        facts += "\n\nWithout a GPU: the times show that the bench works, and nothing else."
    return f"# {document['shape']['name']}\n\n{_kv(document)}\n\n{facts}"


def _kv(document: Document) -> str:
    """Say how many bytes a token's KV has, on which rank."""
    shape = _shape(document)
    ranks = shape.tensor_parallel
    nbytes = shape.token_bytes(2 if "gpu" in document["machine"] else 4)
    own = f"{nbytes // ranks:,}"
    if shape.sharing_ranks > 1:
        return f"{own} bytes of KV per token, the same on all {ranks} ranks"
    of_ranks = f", {own} on each of {ranks} ranks" if ranks > 1 else ""
    return f"{nbytes:,} bytes of KV per token{of_ranks}"


def shown_spread(values: dict[str, float], scale: float, digits: int) -> str:
    """Show a median, and the range where there is one."""
    median, low, high = (f"{scale * values[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return median if low == high else f"{median} ({low} to {high})"


def _ttft(document: Document, found: Found) -> str:
    rows = []
    for tokens in document["shape"]["prompt_tokens"]:
        cells = [f"{tokens:,}"]
        cells += [
            shown_spread(result[str(tokens)]["repeated"], 1e3, 1) for result in found.values()
        ]
        local = found.get("off", {}).get(str(tokens), {}).get("in GPU cache")
        cells.append(f"{1e3 * local['median']:.1f}" if local else "-")
        floor = floor_seconds(document, tokens)
        cells.append(f"{1e3 * floor:.1f}" if floor else "-")
        rows.append(cells)
    question = "How long until the first token of a prompt that comes again? ms, median (range)"
    return markdown_table(question, ["tokens", *found, "hit in GPU cache", "floor"], rows)


def _throughput(document: Document, found: Found) -> str:
    rows = []
    for hits in ("0", "50", "100"):
        rates = [result.get(hits, {}).get("tokens_per_second") for result in found.values()]
        shown = [shown_spread(rate, 1e-3, 1) if rate else "as 0 % hits" for rate in rates]
        rows.append([f"{hits} % hits", *shown])
    shape = document["shape"]
    load = f"{shape['batch_prompts']} prompts of {shape['batch_tokens']:,}"
    question = f"How many tokens a second of {load} tokens at once? thousands, median (range)"
    return markdown_table(question, ["", *found], rows)


def _links_of_hits(document: Document, loads: dict[str, dict[str, list[float]]]) -> str:
    """Compare what a link carries at 100 % hits with what it gives alone, copied either way."""
    shape, rows = _shape(document), []
    own = shape.token_bytes(2) / shape.tensor_parallel
    for name, result in document["results"].items():
        if measured := result.get("throughput", {}).get("100"):
            carried = measured["tokens_per_second"]["median"] * own
            shares = [[f"{carried / rate:.2f}" for rate in way["alone"]] for way in loads.values()]
            rows.append([name, f"{carried / 1e9:.1f}", *map(" / ".join, shares)])
    question = "What does each link carry at 100 % hits? GB/s, and of loads alone, by GPUs"
    head = ["", "GB/s", *(f"of {way}, alone" for way in loads)]
    return markdown_table(question, head, rows) if rows else ""


def _latency(document: Document, found: Found) -> str:
    rows = []
    for phase, label in PHASE_NAMES.items():
        times = [result[phase]["between_tokens"] for result in found.values()]
        rows.append([label, *(f"{1e3 * t['p50']:.1f} / {1e3 * t['p99']:.1f}" for t in times)])
    decodes = document["shape"]["decodes"]
    question = f"How long from token to token, with {decodes} decodes? ms, p50 / p99"
    return markdown_table(question, ["", *found], rows)


def _host_time(_document: Document, found: Found) -> str:
    found = {name: result for name, result in found.items() if name != "off"}
    rows = []
    for phase, label in PHASE_NAMES.items():
        times = [result[phase]["connector_per_step"] for result in found.values()]
        rows.append([label, *(f"{1e6 * t['mean']:,.0f} / {1e6 * t['p99']:,.0f}" for t in times)])
    question = "How much host time do the connector's hooks take in a step? us, mean / p99"
    return markdown_table(question, ["", *found], rows) if found else ""


def _conversations(document: Document, found: Found) -> str:
    def by_rounds(values: Iterable[float], scale: float, digits: int) -> str:
        return " / ".join(f"{scale * value:,.{digits}f}" for value in values)

    rows = []
    for name, rounds in found.items():
        row = [name, by_rounds((held["seconds"] for held in rounds), 1, 1)]
        for key in ("mean", "p50", "p99"):
            row.append(by_rounds((held["first_token"][key] for held in rounds), 1e3, 0))
        for key in ("p90", "p99"):
            row.append(by_rounds((held["between_tokens"][key] for held in rounds), 1e3, 0))
        rows.append(row)
    load = document["shape"]["conversations"]
    question = (
        f"How long do {load['count']} conversations of {load['turns']} turns take, "
        f"{load['at_once']} at a time? s, and ms, by rounds"
    )
    head = ["", "seconds", "first token, mean", "median", "p99", "between tokens, p90", "p99"]
    return markdown_table(question, head, rows)


def _starts(_document: Document, found: Found) -> str:
    # The first start may have compiled what the others found in a cache.
    later = {name: starts[1:] for name, starts in found.items() if len(starts) > 1}
    rows = [
        [name, f"{statistics.median(starts):.1f} ({min(starts):.1f} to {max(starts):.1f})"]
        for name, starts in later.items()
    ]
    question = "How long does an engine take to start? s, median (range) of all but the first"
    return markdown_table(question, ["", "start"], rows) if rows else ""


def _memory(document: Document, found: Found) -> str:
    def growth(memory: dict[str, Any], key: str, sign: int = 1) -> str:
        if key not in memory["now"]:
            return "-"
        return f"{sign * (memory['now'][key] - memory['before'][key]) / MIB:,.0f}"

    rows = []
    for name, memory in found.items():
        pool_bytes = memory["pool_bytes"]
        cells = [name, f"{pool_bytes / MIB:,.0f}" if pool_bytes else "-"]
        shared = "Pss_Shmem" if "Pss_Shmem" in memory["now"] else "RssShmem"
        cells += [growth(memory, "RssAnon"), growth(memory, shared)]
        rows.append([*cells, growth(memory, "MemAvailable", -1)])
    question = (
        f"How much host memory is used, where {document['shape']['host_gib'] * 1024:,.0f} MiB were "
        "asked for? MiB: the pool, and what the process and the machine use more than before the "
        "start"
    )
    return markdown_table(question, ["", "pool", "private", "shared", "machine"], rows)


TABLES: tuple[tuple[str, Callable[[Document, Found], str]], ...] = (
    ("ttft", _ttft),
    ("throughput", _throughput),
    ("latency", _latency),
    ("latency", _host_time),
    ("conversations", _conversations),
    ("starts", _starts),
    ("memory", _memory),
)
"""Each has the results of one section, by connector."""


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
