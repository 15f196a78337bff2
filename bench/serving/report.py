"""Tables and files of the serving benchmark.

usage: python -m bench.serving.report FILE.json    prints the tables of a result as Markdown
       python -m bench.serving.report --pages      writes tables of stored results into the pages

A table on a page is between `<!-- table: NAME of RESULT -->` and `<!-- end -->`; RESULT.json is in
a folder of bench/results. A test compares these tables with the results.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.machine import write_result
from bench.serving.settings import OFF, OURS, PEER, PLUGIN_COLUMNS, WITHOUT_CONNECTOR
from bench.serving.shapes import SHAPES, Shape
from bench.serving.stats import spread

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
PAGES = [
    ROOT / "README.md",
    *(
        ROOT / f"docs/{name}.md"
        for name in (
            "benchmarks/serving",
            "benchmarks/copies",
            "use/comparison",
            "design/host_pool",
            "use/host_pool",
        )
    ),
]
MARKED = re.compile(r"(<!-- table: (\S+) of (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Document = dict[str, Any]
Rounds = dict[str, list[dict[str, Any]]]
"""Measurements of one section by column, one per round."""
PHASE_NAMES = {
    "alone": "alone",
    "storing": "while prompts are computed and stored",
    "loading": "while prompts are loaded",
}


def tables(document: Document) -> str:
    """Return all measurements as Markdown, one table per question."""
    parts = [_heading(document)]
    for name in TABLES:
        if shown := table(document, name):
            parts.append(f"**{QUESTIONS[name]}**\n\n{shown}")
    notes = [
        f"- failed: {one['error']}"
        for rounds in document["results"].values()
        for one in rounds
        if "error" in one
    ]
    if document["missing"]:
        notes.append(f"- missing: {', '.join(document['missing'])}")
    parts.append("\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def table(document: Document, name: str) -> str:
    """Return a table of `WHOLE` or `TABLES`; empty if nothing was measured for it."""
    if name in WHOLE:
        return WHOLE[name](document)
    section, make = TABLES[name]
    results = document["results"].items()
    found = {column: [one[section] for one in of if section in one] for column, of in results}
    found = {column: rounds for column, rounds in found.items() if rounds}
    return make(document, found) if found else ""


def save(document: Document, path: Path) -> None:
    """Write the result as JSON."""
    write_result(path, document)


def result_of(name: str) -> Path | None:
    """Return the path of a stored result; None if there is none."""
    return next(iter(sorted(RESULTS.glob(f"*/{name}.json"))), None)


def filled(page: Path) -> str:
    """Return the text of a page with its tables and their sources updated from the results.

    Tables without a stored result stay unchanged. Only a result's first table on a page names the
    machine and versions.
    """
    described = set()

    def fill(match: re.Match[str]) -> str:
        path = result_of(match[3])
        if path is None:
            return match[0]
        document = json.loads(path.read_text())
        source = f"[{path.parent.name}/{path.name}]({os.path.relpath(path, page.parent)})"
        if path not in described:
            described.add(path)
            source = f"{_facts(document)}: {source}"
        return f"{match[1]}\n{table(document, match[2])}\n\n{source}\n\n{match[5]}"

    return MARKED.sub(fill, page.read_text())


def unproven(document: Document) -> list[str]:
    """Name every figure of this project with an unexpected number of loaded bytes."""
    return [
        f"NOT PROVEN: {column}, round {one['round']}, {figure}: {load['loaded_bytes']} bytes were "
        f"loaded, not {load['least_bytes']} to {load['most_bytes']}"
        for column, rounds in document["results"].items()
        for one in rounds
        for figure, load in _proofs(one)
        if column in PLUGIN_COLUMNS
        and not load["least_bytes"] <= load["loaded_bytes"] <= load["most_bytes"]
    ]


def _proofs(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, int]]]:
    for hits, passes in result.get("throughput", {}).items():
        for number, sent in enumerate(passes):
            if "loads" in sent:
                yield f"throughput {hits} pass {number + 1}", sent["loads"]
    for section in ("ttft", "decodes"):
        for name, measured in result.get(section, {}).items():
            for load in measured.get("loads", ()):
                yield f"{section} {name}", load


def _shape(document: Document) -> Shape:
    return SHAPES[document["shape"]["name"]]


def _item_bytes(document: Document) -> int:
    return 2 if "gpu" in document["machine"] else 4


# -- cells -------------------------------------------------------------------------------------


def markdown_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_table(question: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, under the question that it answers."""
    return f"**{question}**\n\n{markdown_rows(head, rows)}"


def shown_spread(values: dict[str, float], scale: float, digits: int) -> str:
    """Format a median, with its range if there is one."""
    median, low, high = (f"{scale * values[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return median if low == high else f"{median} ({low} to {high})"


def _cell(values: Sequence[float], scale: float = 1, digits: int = 1) -> str:
    return shown_spread(spread(values), scale, digits) if values else "-"


def _cell_of_rounds(rounds: Iterable[Sequence[float]], scale: float, digits: int = 1) -> str:
    return _cell([*itertools.chain.from_iterable(rounds)], scale, digits)


def _least_lead(ours: Sequence[float], peer: Sequence[float]) -> str:
    """Format the smallest speedup of this project over the peer in any round."""
    ratios = [theirs / own for own, theirs in zip(ours, peer, strict=False)]
    return f"{min(ratios):.2f}" if ratios else "-"


# -- tables ------------------------------------------------------------------------------------


def _heading(document: Document) -> str:
    facts = _facts(document)
    if "gpu" not in document["machine"]:
        facts += "\n\nWithout a GPU: the times show that the bench works, and nothing else."
    nbytes = _shape(document).token_bytes(_item_bytes(document))
    name = document["shape"]["name"]
    return f"# {name}\n\n{nbytes:,} bytes of KV per token\n\n{facts}"


_PCIE = re.compile(r", (\d), (\d+)$")
"""The link's generation and width, which `nvidia-smi` lists after the driver."""


def _facts(document: Document) -> str:
    """Describe the machine, the versions and the link's speed."""
    machine = document["machine"]
    names: tuple[str, ...] = ("gpu", "driver", "vllm", "torch", "commit", "date")
    if "gpu" not in machine:
        names = ("cpu", "cpus", *names)
    facts = [f"{name} {machine[name]}" for name in names if machine.get(name)]
    facts = [_PCIE.sub(r", PCIe \1.0 x\2", fact) for fact in facts]
    for direction in ("load", "store") if "results" in document else ():
        if rates := _link(document, direction):
            facts.append(f"a contiguous {direction} moves {_cell(rates, 1e-9)} GB/s")
    return ", ".join(facts)


def _link(document: Document, key: str) -> list[float]:
    rounds = [one for column in document["results"].values() for one in column]
    found = [one["link"][key] for one in rounds if "link" in one]
    return [value for value in found if value is not None]


def _ttft(document: Document, found: Rounds) -> str:
    rates, decode_steps = _link(document, "load"), _link(document, "decode_step")
    rows = []
    for tokens in document["shape"]["prompt_tokens"]:
        row, by_round = [f"{tokens:,}"], {}
        for column, rounds in found.items():
            key = "computed" if column == OFF else "repeated"
            times = [one[str(tokens)][key] for one in rounds]
            by_round[column] = list(map(statistics.median, times))
            row.append(_cell_of_rounds(times, 1e3))
        hits = [one[str(tokens)]["in GPU cache"] for one in found.get(OFF, ())]
        row.append(_cell_of_rounds(hits, 1e3))
        floor = "-"
        if rates:
            _, nbytes = _shape(document).loadable_bytes(tokens, _item_bytes(document))
            seconds = nbytes / statistics.median(rates) + statistics.median(decode_steps)
            floor = f"{1e3 * seconds:.1f}"
        lead = _least_lead(by_round.get(OURS, []), by_round.get(PEER, []))
        rows.append([*row, floor, lead])
    head = ["tokens", *found, "hit in GPU cache", "floor", "least lead"]
    return markdown_rows(head, rows)


def _rates(document: Document, rounds: list[dict[str, Any]], hits: str) -> list[list[float]]:
    """Return the tokens per second of each pass, by round."""
    shape = document["shape"]
    tokens = shape["batch_prompts"] * shape["batch_tokens"]
    return [[tokens / sent["seconds"] for sent in one[hits]] for one in rounds if hits in one]


def _throughput(document: Document, found: Rounds) -> str:
    rows = []
    for hits in ("0", "50", "100"):
        row, seconds = [f"{hits} % hits"], {}
        for column, rounds in found.items():
            rates = _rates(document, rounds, hits)
            seconds[column] = [1 / statistics.median(of) for of in rates]
            row.append(_cell_of_rounds(rates, 1e-3) if rates else "as 0 % hits")
        rows.append([*row, _least_lead(seconds.get(OURS, []), seconds.get(PEER, []))])
    shape = document["shape"]
    tokens = shape["batch_prompts"] * shape["batch_tokens"]
    served = ["tokens not computed then, %"]
    for rounds in found.values():
        shares = [one["100"][0]["cached_tokens"] / tokens for one in rounds if "100" in one]
        served.append(_cell(shares, 100))
    rows.append([*served, ""])
    token_bytes = _shape(document).token_bytes(_item_bytes(document))
    link = ["100 % hits, share of a contiguous copy"]
    for column in found:
        shares = []
        for one in document["results"][column]:
            rate = one.get("link", {}).get("load")
            if rate and (passes := _rates(document, [one["throughput"]], "100")):
                shares.append(statistics.median(passes[0]) * token_bytes / rate)
        link.append(_cell(shares, 1, 2))
    rows.append([*link, ""])
    return markdown_rows(["", *found, "least lead"], rows)


def _decodes(_document: Document, found: Rounds) -> str:
    return _by_phase(found, "between_tokens", 1e3, 1)


def _hooks(_document: Document, found: Rounds) -> str:
    found = {column: rounds for column, rounds in found.items() if column not in WITHOUT_CONNECTOR}
    return _by_phase(found, "connector_per_step", 1e6, 0) if found else ""


def _by_phase(found: Rounds, measured: str, scale: float, digits: int) -> str:
    """Return mean and p99 of the measurements in each phase of decodes."""
    rows = []
    for phase, label in PHASE_NAMES.items():
        for key in ("mean", "p99"):
            cells = [
                _cell([one[phase][measured][key] for one in rounds], scale, digits)
                for rounds in found.values()
            ]
            rows.append([f"{label}, {key}", *cells])
    return markdown_rows(["", *found], rows)


def _summary_columns(document: Document) -> list[str]:
    """Return the columns of the README's tables; without `off`, the peer's computed prompts."""
    found = document["results"]
    return [OFF if OFF in found else PEER, *(name for name in (PEER, OURS) if name in found)]


def _summary_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = {PEER: "vLLM's OffloadingConnector"}
    head = ["", "computed again", *(names.get(column, column) for column in columns[1:])]
    return markdown_rows(head, rows)


def _summary_ttft(document: Document) -> str:
    """Return times to first token for the README."""
    found, columns = document["results"], _summary_columns(document)
    lengths = document["shape"]["prompt_tokens"]
    rows = []
    for tokens in (lengths[1], lengths[-1]):
        row = [f"TTFT of a repeated prompt, {tokens:,} tokens, ms"]
        for place, column in enumerate(columns):
            key = "repeated" if place else "computed"
            times = [one["ttft"][str(tokens)][key] for one in found[column] if "ttft" in one]
            row.append(_cell_of_rounds(times, 1e3, 0))
        rows.append(row)
    return _summary_rows(columns, rows)


def _summary_throughput(document: Document) -> str:
    """Return throughput for the README."""
    found, columns = document["results"], _summary_columns(document)
    shape = document["shape"]
    batch = f"{shape['batch_prompts']} {{}} prompts of {shape['batch_tokens']:,} tokens at once"
    rows = []
    for hits, which in (("100", "repeated"), ("0", "new")):
        row = [f"{batch.format(which)}, thousand tokens/s"]
        for place, column in enumerate(columns):
            rounds = [one["throughput"] for one in found[column] if "throughput" in one]
            row.append(_cell_of_rounds(_rates(document, rounds, hits if place else "0"), 1e-3))
        rows.append(row)
    return _summary_rows(columns, rows)


def _pinning(document: Document) -> str:
    """Format the decode steps of a result of `bench.swap.pinning`."""
    rows = []
    for row in document["rows"]:
        if row["work"] != "steps":
            continue
        locked = row.get("registration_ms", {})
        cells = [f"{row['ms'][key]:.1f}" for key in ("p50", "p99", "max")]
        cells += [f"{locked['p50']:.2f}" if locked else "-", f"{row.get('gib_per_second', '-')}"]
        rows.append([f"{row['piece_mib'] or '-'}", *cells])
    head = ["MiB of a piece", "p50", "p99", "max", "a registration takes", "GiB/s"]
    return markdown_rows(head, rows)


def _pages(document: Document, name: str, columns: Sequence[str]) -> str:
    """Format the copies of scattered pages of `bench/swap/bench_swap.py`, by page size."""
    by_page: dict[int, list[str]] = {}
    for row in document["rows"]:  # all loads come before the stores
        if row["name"] == name and row["path"] != "host":
            cells = by_page.setdefault(row["page_bytes"], [])
            cells += [f"{row[column]:.1f}" for column in columns]
    rows = [[f"{page >> 10:,} KiB", *cells] for page, cells in by_page.items()]
    names = {"gbps": "", "peer_gbps": "peer", "raw_gbps": "not packed", "roofline_gbps": "roofline"}
    head = [names[column] or way for way in ("load", "store") for column in columns]
    return markdown_rows(["page", *head], rows)


def _scattered_pages(document: Document) -> str:
    return _pages(document, "one way", ["gbps", "peer_gbps", "roofline_gbps"])


def _packed_pages(document: Document) -> str:
    return _pages(document, "packed", ["gbps", "raw_gbps"])


def _long_blocks(document: Document) -> str:
    """Format the copies of runs of 2 MiB of `bench/swap/bench_swap.py`: one row per copy path."""
    found = {(row["name"], row["direction"], row["path"]): row for row in document["rows"]}
    names = {"load": "load", "store": "store", "store+load": "both at once"}
    rows = []
    for (name, way, path), row in found.items():
        if name == "long blocks" and "rows" not in path:
            beside = found.get(("slowdown of decodes", way, path))
            cells = [f"{row['gbps']:.1f}", *["-"] * 2]
            if beside is not None:
                cells[1:] = [f"{beside['gbps']:.1f}", f"{beside['ratio']:.2f}"]
            rows.append([names[way], path.removeprefix("runs, "), *cells])
    head = ["direction", "copies", "alone", "next to decodes", "slowdown of decodes"]
    return markdown_rows(head, rows)


def _bursts(document: Document) -> str:
    """Format a result of `bench/scheduler/bench_bursts.py`: one row per burst."""
    by_burst: dict[tuple[str, int], dict[str, str]] = {}
    for row in document["rows"]:
        cells = by_burst.setdefault((row["prefixes"], row["requests"]), {})
        cells[row["where"]] = f"{row['p50_step_ms']:.1f}"
    columns = list(dict.fromkeys(row["where"] for row in document["rows"]))
    names = {
        "equal": f"that share {document['equal_blocks']} blocks",
        "different": f"with {document['different_blocks']} separate blocks each",
    }
    rows = [
        [f"{requests:,} {names[prefixes]}", *(cells.get(column, "-") for column in columns)]
        for (prefixes, requests), cells in by_burst.items()
    ]
    return markdown_rows(["requests", *columns], rows)


def _replicas(document: Document) -> str:
    """Format a result of `bench.pool`: one row per column."""
    rows = []
    for name, column in document["columns"].items():
        if (found := column.get("summary")) is not None:
            cells = [f"{100 * found['hit_share']:.1f}"]
            cells += [f"{1e3 * found[key]:.0f}" for key in ("ttft_p50", "ttft_p90")]
            cells += [f"{1e-3 * found['tokens_per_second']:.1f}"]
            shared = found["peers_read_bytes"] + found.get("remote_read_bytes", 0)
            moved = (found["loaded_bytes"], shared, found["stored_bytes"])
            cells += [f"{1e-9 * nbytes:.1f}" for nbytes in moved]
            rows.append([name, f"{found['replicas']}", *cells])
    head = ["host memory", "replicas", "hits, % of repeated tokens", "TTFT p50, ms", "p90, ms"]
    head += ["thousand tokens/s", "loaded, GB", "read from peers or store, GB", "stored, GB"]
    return markdown_rows(head, rows)


def _lookups(document: Document) -> str:
    """Format a result of `bench/pool/bench_lookups.py`: one row per case."""
    rows = [[row["case"], shown_spread(row["seconds"], 1e3, 2)] for row in document["rows"]]
    return markdown_rows([f"{document['keys']:,} blocks", "CPU time, ms, median (range)"], rows)


WHOLE: dict[str, Callable[[Document], str]] = {
    "summary_ttft": _summary_ttft,
    "summary_throughput": _summary_throughput,
    "pinning": _pinning,
    "scattered_pages": _scattered_pages,
    "packed_pages": _packed_pages,
    "long_blocks": _long_blocks,
    "bursts": _bursts,
    "replicas": _replicas,
    "lookups": _lookups,
}
"""Tables made from whole results."""
TABLES: dict[str, tuple[str, Callable[[Document, Rounds], str]]] = {
    "throughput": ("throughput", _throughput),
    "ttft": ("ttft", _ttft),
    "decodes": ("decodes", _decodes),
    "hooks": ("decodes", _hooks),
}
"""Tables by name, each with the section that it shows."""
QUESTIONS = {
    "throughput": "Throughput of many prompts at once, thousand tokens/s, median (range)",
    "ttft": "TTFT of a repeated prompt, ms, median (range)",
    "decodes": "Inter-token latency of running decodes, ms, median (range) of the rounds",
    "hooks": "Time in the connector's hooks per step, us, median (range) of the rounds",
}


def main(words: Sequence[str]) -> None:
    """Print the tables of a result, or update those in the pages."""
    if list(words) != ["--pages"]:
        try:
            document = json.loads(Path(words[0]).read_text())
        except (IndexError, OSError, ValueError) as error:
            sys.exit(f"give the file of a result, such as those in bench/results: {error}")
        print(tables(document))
        return
    for page in PAGES:
        page.write_text(filled(page))


if __name__ == "__main__":
    main(sys.argv[1:])
