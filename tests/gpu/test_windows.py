"""Loads from an arena that another process has page-locked; the contract has the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_bytes_of_another_process_arrive(tmp_path):
    """The module raises if a byte differs: raw and packed, by kernels or copy engine."""
    out = tmp_path / "windows.json"
    options = ["--gib", "0.25", "--rounds", "3", "--out", str(out)]
    command = [sys.executable, "-m", "bench.swap.windows", *options]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=240)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) >= 2
    assert "host" not in {row["path"] for row in rows}
