"""The entry points of `pyproject.toml` as an installation has them, for a checkout without one."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.support.processes import ROOT


def write_entry_points(folder: Path) -> Path:
    """Write into a folder what `importlib.metadata` reads of this package; return the folder.

    On Python's path it comes before an older installation.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"kv_offload-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder
