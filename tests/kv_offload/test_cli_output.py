"""What every subcommand of `kv-offload` does with its output, its help and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_offload.cli.main import main
from tests.kv_offload.status.server import page_server, recorded
from tests.support.published_models import PUBLISHED

COMMAND = f"{shlex.quote(sys.executable)} -m kv_offload.cli"
COMMANDS = ["config", "doctor", "size", "status"]
ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield for each subcommand one run that has a page to print."""
    model = tmp_path / "model ☃"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-8B"]))
    (tmp_path / "☃.yaml").write_text("cpu_bytes: 1MiB")
    for package in ("torch", "transformers"):  # they take long to import, and add nothing here
        (tmp_path / f"{package}.py").write_text("raise ImportError")
    file = shlex.quote(str(tmp_path / "☃.yaml"))
    with page_server(recorded("hits").replace("small", "☃")) as server:
        yield {
            "config": f"{COMMAND} config {file}",
            "doctor": f"{COMMAND} doctor --no-measure {file}",
            "size": f"{COMMAND} size {shlex.quote(str(model))}",
            "status": f"{COMMAND} status {server.address}",
        }


def run_in_shell(
    folder: Path, command: str, stdout: int = subprocess.PIPE, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join([str(folder), *sys.path]), **more},
        check=False,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_output_goes_anywhere(commands: dict[str, str], tmp_path: Path, name: str) -> None:
    """To a full disk, to nowhere, and to a locale that lacks its letters."""
    done = run_in_shell(tmp_path, f"{commands[name]} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == (
        "kv-offload: standard output cannot be written: [Errno 28] No space left on device. "
        "Free space, or write elsewhere.\n"
    )
    closed = run_in_shell(tmp_path, f"{commands[name]} >&-")
    in_ascii = run_in_shell(tmp_path, commands[name], **ASCII_ONLY)
    for done in (closed, in_ascii):
        assert done.returncode in ((0, 1) if name == "doctor" else (0,))
        assert done.stderr == ""
    assert in_ascii.stdout.isascii()
    assert in_ascii.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_went_away_is_no_error(
    commands: dict[str, str], tmp_path: Path, name: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_in_shell(tmp_path, f"{commands[name]}; echo $? >&2", stdout=writing)
    finally:
        os.close(writing)
    assert done.stderr == "141\n"


def run_on_terminal(folder: Path, command: str, **more: str) -> str:
    """Return what a command writes to a terminal of its own."""
    ours, theirs = os.openpty()
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run_in_shell(folder, command, stdout=theirs, TERM="xterm-256color", **more)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return b"".join(parts).decode()


@pytest.mark.parametrize("name", ["doctor", "status"])
def test_escapes_are_for_terminals_that_want_colour(
    commands: dict[str, str], tmp_path: Path, name: str
) -> None:
    command = commands[name] + (" --once" if name == "status" else "")
    assert "\x1b[" in run_on_terminal(tmp_path, command)
    without = run_on_terminal(tmp_path, command, NO_COLOR="1")
    forced = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "CLICOLOR_FORCE": "1"}
    piped = run_in_shell(tmp_path, command, TERM="xterm-256color", **forced).stdout
    for output in (without, piped):
        assert output
        assert "\x1b" not in output


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"kv_offload.cli.{name}._run", interrupt)
    required = {"size": ["config.json"], "status": ["localhost:8000"]}
    assert main([name, *required.get(name, [])]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help_states_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "exit status is" in output
    assert "2" in output.partition("exit status is")[2]
