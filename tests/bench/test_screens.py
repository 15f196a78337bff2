"""The pictures of the docs: a short run of their command, and the units of their axes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.screens.__main__ import main
from bench.screens.units import scale
from tests.support.dashboard import DASHBOARD

ROOT = Path(__file__).parents[2]
PICTURES = {
    "doctor": ["kv-offload", "problem", "plugin: VLLM_PLUGINS is 'lora_resolver'", "not checked"],
    "status": ["Asked of host memory, in tokens", "loaded: the hit rate", "last 2."],
    "dashboard": [panel["title"] for panel in DASHBOARD["panels"]],
}
LARGEST_BYTES = 150_000


def words(picture: Path) -> str:
    """Return the text of a picture."""
    return "".join(ElementTree.parse(picture).getroot().itertext()).replace("\xa0", " ")


def check(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {f"{name}.svg" for name in PICTURES}
    for name, expected in PICTURES.items():
        picture = folder / f"{name}.svg"
        shown = words(picture)
        assert [text for text in expected if text not in shown] == []
        assert picture.stat().st_size < LARGEST_BYTES
        text = picture.read_text()
        assert "@font-face" not in text
        assert "url(http" not in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_writes_the_pictures_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM, which is not installed")
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus, as Debian's package of that name brings it")
    command = [sys.executable, "-m", "bench.screens", "--out", str(tmp_path), "--seconds", "5"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "transfer"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path)
    # What only this machine has does not stand in them.
    for name in ("doctor", "status"):
        shown = words(tmp_path / f"{name}.svg")
        assert str(ROOT) not in shown
        assert os.uname().nodename not in shown


def test_without_prometheus_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.screens.__main__.PROGRAM", None)
    assert main(["--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("there is no program `prometheus` on the PATH: install Debian's package")
    assert not (tmp_path / "out").exists()


def test_the_pictures_of_the_docs_are_whole() -> None:
    check(ROOT / "docs/pictures")


@pytest.mark.parametrize(
    ("unit", "largest", "expected"),
    [
        ("percentunit", 0.3, (0.01, "%")),
        ("short", 20000, (1, "")),
        ("cps", 3, (1, "c/s")),
        ("s", 0.002, (1e-3, "ms")),
        ("s", 2, (1, "s")),
        ("Bps", 0, (1, "B/s")),
        ("Bps", 2500, (1000, "kB/s")),
        ("Bps", 3e9, (1e9, "GB/s")),
        ("bytes", 500, (1, "B")),
        ("bytes", 1024, (1024, "KiB")),
        ("bytes", 64 << 20, (1 << 20, "MiB")),
        ("bytes", 1 << 60, (1 << 40, "TiB")),
    ],
)
def test_values_are_shown_in_a_unit_of_their_size(
    unit: str, largest: float, expected: tuple[float, str]
) -> None:
    assert scale(unit, largest) == expected


def test_every_unit_of_the_dashboard_is_known() -> None:
    for panel in DASHBOARD["panels"]:
        assert scale(panel["fieldConfig"]["defaults"]["unit"], 1.0)
