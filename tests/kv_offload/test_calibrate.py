"""`kv-offload calibrate` without a GPU: what it says, and what it writes of given figures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kv_swap.calibration import Calibration, read_cached
from kv_swap.engine import Direction

from kv_offload.cli import calibrate as command
from kv_offload.cli.main import main
from tests.transfer.test_path_rule import KEY, make_calibration


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """Figures as if measured: the copy engine wins loads of 2 MiB."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calibration = make_calibration(
        lambda path, way, page_bytes, pages: (
            55.0 if (path, way, page_bytes) == ("dma", Direction.LOAD, 2 << 20) else 51.0
        )
    )
    monkeypatch.setattr(command, "_measure", lambda index: calibration)
    return calibration


def fake_torch(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    cuda = SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices)
    torch: Any = SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(
    ("devices", "arguments", "message"),
    [
        (0, [], "there is no CUDA device 0 to measure: torch finds no CUDA device here"),
        (2, ["--device", "2"], "there is no CUDA device 2 to measure: 2 CUDA device(s) are there"),
    ],
)
def test_without_the_device_it_says_so_in_one_line(
    devices: int,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_torch(monkeypatch, devices)
    assert main(["calibrate", *arguments]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"kv-offload: {message}\n")


def test_without_torch_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["calibrate"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("kv-offload: torch cannot be imported")
    assert output.err.count("\n") == 1


def test_it_prints_the_table_and_keeps_it(
    measured: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{KEY.name}, driver {KEY.driver}")
    rows = [line.split() for line in lines if line.endswith((" kernel", " dma"))]
    assert len(rows) == 16
    chosen = [row[:4] for row in rows if row[-1] == "dma"]
    assert chosen == [["load", "2048", "KiB", "8"], ["load", "2048", "KiB", "32"]]
    assert lines[-1].startswith("Kept in ")
    assert read_cached(KEY) == measured


def test_a_cache_that_cannot_be_written_is_no_failure(
    measured: Calibration, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "write_cached", lambda calibration: None)
    assert main(["calibrate"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Not kept")


def test_results_go_to_a_folder(
    measured: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["calibrate", "--out", str(out)]) == 0
    content = (out / "calibration.json").read_bytes()
    assert msgspec.json.decode(content, type=Calibration) == measured
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (out / "calibration.png").exists() == drawn
    assert ("pip install matplotlib" in capsys.readouterr().err) != drawn


def test_a_folder_that_cannot_be_written_is_status_1(
    measured: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["calibrate", "--out", str(tmp_path / "file")]) == 1
    assert "cannot write the results" in capsys.readouterr().err
