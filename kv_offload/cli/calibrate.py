"""`kv-offload calibrate`: measures the copy paths of a GPU and shows which one copies what."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from kv_swap.calibration import PAGE_BYTES, PAGES, Calibration, write_cached
from kv_swap.cuda.copy_path import PATHS, PathName
from kv_swap.engine import Direction
from kv_swap.errors import TransferError
from kv_swap.path_rule import MARGINS, MeasuredRule


def add_calibrate_command(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kv-offload calibrate [--device N] [--out FOLDER]`."""
    parser = subcommands.add_parser(
        "calibrate",
        help="measure the copy paths of this machine's GPU",
        description="Measure, on an idle GPU, how fast the swap kernels and the copy engine move "
        "pages, print the table, and keep it where engines on this device look for it when they "
        "start.",
    )
    parser.add_argument(
        "--device", metavar="N", type=int, default=0, help="index of the CUDA device (default 0)"
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="also write calibration.json, and calibration.png where matplotlib is installed",
    )
    parser.set_defaults(run=_run_calibrate)


def _run_calibrate(arguments: argparse.Namespace) -> int:
    try:
        calibration = _measure(arguments.device)
    except TransferError as error:
        print(f"kv-offload: {error}", file=sys.stderr)
        return 1
    print(format_table(calibration))
    kept = write_cached(calibration)
    print(f"\nKept in {kept}." if kept else "\nNot kept: the next engine start will not know it.")
    if arguments.out is not None:
        try:
            write_results(calibration, arguments.out)
        except OSError as error:
            print(f"kv-offload: cannot write the results: {error}", file=sys.stderr)
            return 1
    return 0


def _measure(index: int) -> Calibration:
    """Measure one device. Raises `TransferError` where there is none."""
    try:
        import torch
    except ImportError as error:
        raise TransferError(
            f"torch cannot be imported, which vLLM brings: {error}; run this where vLLM runs"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        found = f"{count} CUDA device(s) are there" if count else "torch finds no CUDA device here"
        raise TransferError(f"there is no CUDA device {index} to measure: {found}")
    from kv_swap.calibrate import measure

    return measure(torch.device("cuda", index))


def format_table(calibration: Calibration) -> str:
    """Return the figures in GB/s, and which path the engine chooses."""
    key = calibration.key
    rule = MeasuredRule(calibration)
    lines = [
        f"{key.name}, driver {key.driver}, PCIe {key.link}",
        "",
        f"{'':6} {'page':>8} {'pages':>6} {'kernel':>9} {'dma':>9}   chosen",
    ]
    for direction in Direction:
        for page_bytes in PAGE_BYTES:
            for pages in PAGES:
                kernel, dma = (rule.gbps(path, direction, page_bytes, pages) for path in PATHS)
                lines.append(
                    f"{direction.value:6} {page_bytes >> 10:4} KiB {pages:6} {kernel:9.1f} "
                    f"{dma:9.1f}   {rule.choose(direction, page_bytes, pages)}"
                )
    margins = " and ".join(f"{MARGINS[way]:.0%} for {way.value}s" for way in Direction)
    lines += ["", f"GB/s. The copy engine (dma) is chosen where it is faster by {margins}."]
    return "\n".join(lines)


def write_results(calibration: Calibration, folder: Path) -> None:
    """Write JSON and PNG into `folder`. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(calibration))
    (folder / "calibration.json").write_bytes(content + b"\n")
    print(f"Wrote {folder / 'calibration.json'}.")
    try:
        import matplotlib as mpl
    except ImportError:
        print(
            "No calibration.png was drawn: matplotlib is not installed; pip install matplotlib",
            file=sys.stderr,
        )
        return
    mpl.use("Agg")
    _draw(calibration, folder / "calibration.png")
    print(f"Wrote {folder / 'calibration.png'}.")


def _draw(calibration: Calibration, target: Path) -> None:
    """Draw GB/s over the page size: a panel a direction, a line for each path and number."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    grids = calibration.grids()
    styles: dict[PathName, str] = {"kernel": "-", "dma": "--"}
    for panel, direction in zip(panels, Direction, strict=True):
        for path in PATHS:
            for pages, gbps in zip(PAGES, grids[path, direction].T, strict=True):
                sizes = [page_bytes / 1024 for page_bytes in PAGE_BYTES]
                panel.plot(sizes, gbps, styles[path], marker="o", label=f"{path}, {pages} pages")
        panel.set_xscale("log", base=2)
        panel.set(ylim=(0, None), xlabel="page, KiB", ylabel="GB/s", title=direction.value)
        panel.grid(alpha=0.3)
        panel.legend()
    key = calibration.key
    figure.suptitle(f"{key.name} · {key.driver} · {key.link}")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
