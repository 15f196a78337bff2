"""Rows of the swap bench: what one measurement is, and how all of them are kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

COMMIT_VARIABLE = "KV_OFFLOAD_BENCH_COMMIT"

COPY_ENGINE = "copy engine"
"""What rows call the path of plain copies; `one big copy` is the roofline's."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    `ratio` is that to the roofline; of a slowdown, the time of the work beside copies over its time
    alone, and `gbps` is what the copies reach meanwhile. `microseconds` is a latency where the name
    says so.
    """

    name: str
    direction: str
    page_bytes: int
    path: str
    gbps: float | None = None
    roofline_gbps: float | None = None
    peer_gbps: float | None = None
    submit_us: float | None = None
    ratio: float | None = None
    microseconds: float | None = None


def save(rows: list[Row], directory: Path) -> None:
    """Write `swap.json` and, where matplotlib is installed, `swap.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    (directory / "swap.json").write_text(json.dumps(document, indent=1) + "\n")
    plot(document, directory / "swap.png")


def plot(document: dict[str, Any], target: Path) -> None:
    """Draw bandwidth over page size, a panel per direction."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [row for row in document["rows"] if row["name"] == "one way"]
    # Copies within the host are another scale; alone they are drawn all the same.
    rows = [row for row in rows if row["path"] != "host"] or rows
    directions = sorted({row["direction"] for row in rows})
    if not rows:
        return
    figure, panels = pyplot.subplots(1, len(directions), figsize=(11, 4), squeeze=False)
    for panel, direction in zip(panels[0], directions, strict=True):
        for path in sorted({row["path"] for row in rows}):
            chosen = [r for r in rows if (r["direction"], r["path"]) == (direction, path)]
            chosen.sort(key=lambda row: row["page_bytes"])
            sizes = [row["page_bytes"] / 1024 for row in chosen]
            lines = {"gbps": path, "roofline_gbps": "one big copy"}
            if path == COPY_ENGINE:  # the same roofline, measured again
                del lines["roofline_gbps"]
            for key, label in lines.items():
                panel.plot(sizes, [row[key] for row in chosen], marker="o", label=label)
            if any(row["peer_gbps"] for row in chosen):
                peer = [row["peer_gbps"] for row in chosen]
                panel.plot(sizes, peer, marker="o", label="vLLM swap_blocks_batch")
        panel.set(xscale="log", ylim=(0, None), xlabel="page, KiB", ylabel="GB/s", title=direction)
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
        panel.legend()
    facts = document["machine"]
    title = " · ".join(str(facts[k]) for k in ("gpu", "driver", "date", "commit") if facts.get(k))
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def machine() -> dict[str, str | int | None]:
    """Describe what the figures were measured on."""
    facts: dict[str, str | int | None] = {
        "date": time.strftime("%Y-%m-%d"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": os.environ.get(COMMIT_VARIABLE) or _output("git", "rev-parse", "--short", "HEAD"),
    }
    torch = cuda_torch()
    if torch is not None:
        import cupy

        query = "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current"
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["driver"] = _output("nvidia-smi", query, "--format=csv,noheader", "--id=0")
        facts["torch"] = torch.__version__
        facts["cupy"] = cupy.__version__
        facts["cuda_driver"] = cupy.cuda.runtime.driverGetVersion()
        facts["vllm"] = getattr(vllm_module(), "__version__", None)
    return facts


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cuda_torch() -> Any:
    """Return torch if it has a CUDA device and CuPy is there, else None."""
    try:
        import cupy  # noqa: F401
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def vllm_module() -> Any:
    """Return vllm, or None. Its import warns of much that is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm
            import vllm._custom_ops
        except ImportError:
            return None
    return vllm


if __name__ == "__main__":  # draw what a machine without matplotlib measured
    path = Path(sys.argv[1])
    plot(json.loads(path.read_text()), path.with_suffix(".png"))
