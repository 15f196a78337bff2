"""Tables, plots and files of the serving bench.

usage: python -m bench.serving_report FILE.json    writes the Markdown and the plots beside it
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.serving_shapes import SHAPES

Document = dict[str, Any]
PHASE_NAMES = {
    "alone": "alone",
    "storing": "while prompts are computed and stored",
    "loading": "while prompts are loaded",
}
MIB = 1 << 20


def tables(document: Document) -> str:
    """Return everything that was measured as Markdown."""
    results: dict[str, Any] = document["results"]
    parts = [_heading(document)]
    parts += [_ttft(document), _throughput(document), _latency(document), _costs(document)]
    notes = [f"- failed: {result['error']}" for result in results.values() if "error" in result]
    peers = [name for name in results if name.startswith("vllm") and "error" not in results[name]]
    if peers:
        notes.append(f"- not proven: that {' and '.join(peers)} loaded what it should have")
    parts.append("\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def unproven(document: Document) -> list[str]:
    """Name every figure of this project whose loaded bytes are not those that were to be loaded."""
    problems = []
    for figure, load in _proofs(document["results"].get("kv-offload", {})):
        if not load["least_bytes"] <= load["loaded_bytes"] <= load["most_bytes"]:
            problems.append(
                f"NOT PROVEN: kv-offload, {figure}: {load['loaded_bytes']} bytes were loaded, not "
                f"{load['least_bytes']} to {load['most_bytes']}"
            )
    return problems


def _proofs(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, int]]]:
    for section in ("ttft", "throughput", "latency"):
        for name, measured in result.get(section, {}).items():
            for load in measured.get("loads", ()):
                yield f"{section} {name}", load


# -- tables ------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _heading(document: Document) -> str:
    machine = document["machine"]
    names = ("gpu", "driver", "platform", "vllm", "torch", "commit", "date")
    facts = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    return f"# {document['shape']['name']}, {document['mode']}\n\n{facts}"


def _measured(document: Document, section: str) -> dict[str, Any]:
    return {
        name: result[section] for name, result in document["results"].items() if section in result
    }


def floor_seconds(document: Document, tokens: int) -> float | None:
    """Return the least time for a repeated prompt: its bytes over the link and a decode step."""
    link = document["results"].get("off", {}).get("link")
    if not link or not link["bytes_per_second"]:
        return None
    _, nbytes = SHAPES[document["shape"]["name"]].loadable_bytes(tokens, 2)
    return float(nbytes / link["bytes_per_second"] + link["decode_step"])


def _ttft(document: Document) -> str:
    found = _measured(document, "ttft")
    if not found:
        return ""
    rows = []
    for tokens in document["shape"]["prompt_tokens"]:
        cells = [f"{tokens}"]
        for result in found.values():
            times = {key: 1e3 * value for key, value in result[str(tokens)]["repeated"].items()}
            cells.append(f"{times['median']:.2f} ({times['min']:.2f} to {times['max']:.2f})")
        local = found.get("off", {}).get(str(tokens), {}).get("in GPU cache")
        cells.append(f"{1e3 * local['median']:.2f}" if local else "-")
        floor = floor_seconds(document, tokens)
        cells.append(f"{1e3 * floor:.2f}" if floor else "-")
        ours = found.get("kv-offload")
        ratio = ours[str(tokens)]["repeated"]["median"] / floor if ours and floor else None
        cells.append(f"{ratio:.2f}" if ratio else "-")
        rows.append(cells)
    head = ["repeated prompt, tokens", *found, "hit in GPU cache", "floor", "kv-offload / floor"]
    return "Time to first token, ms: median (range)\n\n" + table(head, rows)


def _throughput(document: Document) -> str:
    found = _measured(document, "throughput")
    if not found:
        return ""
    rows = []
    for hits in ("0", "50", "100"):
        cells = [f"{hits} %"]
        for result in found.values():
            rate = result[hits]["tokens_per_second"]["median"] if hits in result else None
            cells.append(f"{rate:,.0f}" if rate else "as 0 %")
        rows.append(cells)
    shape = document["shape"]
    load = f"{shape['batch_prompts']} prompts of {shape['batch_tokens']}"
    text = f"Throughput, tokens/s, {load}\n\n" + table(["hits", *found], rows)
    if pairs := document["pairs"]:
        text += (
            f"\n\nkv-offload / off at 0 % hits, {pairs['pairs']} interleaved pairs: "
            f"{pairs['ratio']:.4f}, 95 % interval {pairs['low']:.4f} to {pairs['high']:.4f}"
        )
    return text


def _latency(document: Document) -> str:
    found = _measured(document, "latency")
    if not found:
        return ""
    rows = []
    for phase, label in PHASE_NAMES.items():
        for name, result in found.items():
            times = result[phase]["between_tokens"]
            cells = [f"{1e3 * times[key]:.2f}" for key in ("p50", "p90", "p99", "max")]
            host = result[phase].get("connector_per_step")
            cells += [f"{1e6 * host[key]:.0f}" for key in ("mean", "p99")] if host else ["-", "-"]
            rows.append([f"{label}: {name}", *cells, str(result[phase]["steps"])])
    head = [
        f"{document['shape']['decodes']} decodes",
        *("p50", "p90", "p99", "max", "host mean, us", "host p99, us", "steps"),
    ]
    return "Inter-token latency, ms, and host time in the connector's hooks a step\n\n" + table(
        head, rows
    )


def _costs(document: Document) -> str:
    results = document["results"]
    rows = []
    for name, result in results.items():
        if not result["starts"]:
            continue
        # Of several starts the first may have compiled what the others found in a cache.
        starts = result["starts"][1:] or result["starts"]
        cells = [name, f"{statistics.median(starts):.2f}", str(len(starts))]
        memory = result.get("memory")
        pool_bytes = memory["pool_bytes"] if memory else None
        cells.append(f"{pool_bytes / MIB:,.0f}" if pool_bytes else "-")
        for key in ("VmLck", "VmPin", "RssAnon", "RssShmem"):
            cells.append(_growth(memory, key))
        cells.append(_growth(memory, "MemAvailable", -1))
        rows.append(cells)
    asked = document["shape"]["host_gib"] * 1024
    head = ["engine", "start, s", "of", "pool", "VmLck", "VmPin", "RssAnon", "RssShmem", "machine"]
    return (
        f"Start; host memory, MiB: {asked:,.0f} were asked for; the pool, and what the process and "
        "the whole machine use more than before the start\n\n" + table(head, rows)
    )


def _growth(memory: dict[str, Any] | None, key: str, sign: int = 1) -> str:
    if not memory or key not in memory["now"]:
        return "-"
    return f"{sign * (memory['now'][key] - memory['before'][key]) / MIB:,.0f}"


# -- plots -------------------------------------------------------------------------------------


def plot(document: Document, target: Path) -> bool:
    """Draw what was measured, a panel a section; False without matplotlib or without a section."""
    panels: list[Callable[[Any, Document], None]] = [
        draw
        for section, draw in (
            ("ttft", _plot_ttft),
            ("throughput", _plot_throughput),
            ("latency", _plot_latency),
        )
        if _measured(document, section)
    ]
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return False
    if not panels:
        return False
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for panel, draw in zip(axes[0], panels, strict=True):
        draw(panel, document)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(_heading(document).replace("\n\n", " · ").removeprefix("# "), fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return True


def _plot_ttft(panel: Any, document: Document) -> None:
    lengths = document["shape"]["prompt_tokens"]
    for name, result in _measured(document, "ttft").items():
        medians = [1e3 * result[str(tokens)]["repeated"]["median"] for tokens in lengths]
        panel.plot(lengths, medians, marker="o", label=name)
    floors = [floor_seconds(document, tokens) for tokens in lengths]
    if all(floors):
        panel.plot(lengths, [1e3 * floor for floor in floors if floor], "k--", label="floor")
    panel.set(xlabel="tokens", ylabel="ms", title="time to first token, repeated prompt")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")


def _plot_throughput(panel: Any, document: Document) -> None:
    found = _measured(document, "throughput")
    hits = ("0", "50", "100")
    for index, (name, result) in enumerate(found.items()):
        rates = [
            result.get(share, result["0"])["tokens_per_second"]["median"] / 1e3 for share in hits
        ]
        places = [at + 0.8 * index / len(found) for at in range(len(hits))]
        panel.bar(places, rates, width=0.7 / len(found), label=name)
    panel.set_xticks([at + 0.3 for at in range(len(hits))], [f"{share} %" for share in hits])
    panel.set(xlabel="hits", ylabel="thousand tokens/s", title="throughput")


def _plot_latency(panel: Any, document: Document) -> None:
    found = _measured(document, "latency")
    for index, (name, result) in enumerate(found.items()):
        p99 = [1e3 * result[phase]["between_tokens"]["p99"] for phase in PHASE_NAMES]
        places = [at + 0.8 * index / len(found) for at in range(len(p99))]
        panel.bar(places, p99, width=0.7 / len(found), label=name)
    panel.set_xticks([at + 0.3 for at in range(len(PHASE_NAMES))], list(PHASE_NAMES))
    panel.set(ylabel="ms", title="inter-token latency, p99")


# -- files -------------------------------------------------------------------------------------


def save(document: Document, folder: Path) -> list[Path]:
    """Write JSON, Markdown and, where matplotlib is, PNG; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"serving-{document['shape']['name']}"
    if document["mode"] != "one process":
        stem += "-" + document["mode"].replace(" ", "-")
    data, text, picture = (folder / f"{stem}.{kind}" for kind in ("json", "md", "png"))
    data.write_text(json.dumps(document, indent=1) + "\n")
    text.write_text(tables(document) + "\n")
    return [data, text, *([picture] if plot(document, picture) else [])]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    for written in save(json.loads(source.read_text()), source.parent):
        print(written)
