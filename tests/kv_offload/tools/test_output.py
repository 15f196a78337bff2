"""What every subcommand of `kv-offload` does with its output, its help and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kv_offload
from tests.kv_offload.tools.status.server import HITS, page_server
from tests.support.commands import COMMAND, PYTHON, Terminal, run_in_shell
from tests.support.published_models import PUBLISHED

COMMANDS = ["config", "doctor", "size", "status"]
ALL_COMMANDS = {*COMMANDS, "pool", "simulate", "tier"}
ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[dict[str, str]]:
    model = tmp_path / "model ☃"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-8B"]))
    (tmp_path / "☃.yaml").write_text("cpu_bytes: 1MiB")
    for package in ("torch", "transformers"):  # they take long to import, and add nothing here
        (tmp_path / f"{package}.py").write_text("raise ImportError")
    file = shlex.quote(str(tmp_path / "☃.yaml"))
    with page_server(HITS.replace("small", "☃")) as server:
        yield {
            "config": f"{COMMAND} config {file}",
            "doctor": f"{COMMAND} doctor --no-measure {file}",
            "size": f"{COMMAND} size {shlex.quote(str(model))}",
            "status": f"{COMMAND} status {server.address}",
        }


@pytest.mark.parametrize("name", COMMANDS)
def test_output_goes_anywhere(commands, tmp_path, name):
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


@pytest.mark.parametrize(
    ("name", "status"),
    [*((name, 141) for name in COMMANDS), ("--version", 0), ("config --help", 0)],
)
def test_a_reader_that_went_away_is_no_error(commands, tmp_path, name, status):
    """As in `kv-offload config | head -1`: quiet, with the status of a tool that SIGPIPE ended."""
    command = commands.get(name, f"{COMMAND} {name}")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = run_in_shell(tmp_path, f"{command}; echo $? >&2", stdout=closed.fileno())
    assert done.stderr == f"{status}\n"


@pytest.mark.parametrize(("name", "escape"), [("doctor", "\x1b[32mok"), ("status", "\x1b[")])
def test_escapes_are_for_terminals_that_want_colour(commands, tmp_path, name, escape):
    command = commands[name] + (" --once" if name == "status" else "")

    def on_terminal(**more: str) -> str:
        path = os.pathsep.join([str(tmp_path), *sys.path])
        with Terminal(["bash", "-c", command], PYTHONPATH=path, **more) as terminal:
            terminal.wait()
        return terminal.output

    assert escape in on_terminal()
    forced = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "CLICOLOR_FORCE": "1"}
    piped = run_in_shell(tmp_path, command, TERM="xterm-256color", **forced).stdout
    for output in (on_terminal(NO_COLOR="1"), piped):
        assert output
        assert "\x1b" not in output


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_quiet(monkeypatch, command, name):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    module = {"config": "config", "size": "sizing.command"}.get(name, f"{name}.command")
    monkeypatch.setattr(f"kv_offload.tools.{module}._run", interrupt)
    required = {"size": ["config.json"], "status": ["localhost:8000"]}
    assert command(name, *required.get(name, [])) == (128 + signal.SIGINT, "", "")


def test_without_a_command_each_has_a_line(command):
    done = command()
    assert (done.status, done.err) == (0, "")
    listed = dict(re.findall(r"^    ([a-z]+) +(\S.*)$", done.out, re.MULTILINE))
    assert listed.keys() == ALL_COMMANDS


def test_the_package_can_be_run_as_a_module(tmp_path):
    done = run_in_shell(tmp_path, f"{PYTHON} -m kv_offload --version")
    assert (done.returncode, done.stdout) == (0, f"kv-offload {kv_offload.__version__}\n")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("kv-offload ", ALL_COMMANDS),
        ("kv-offload status --ch", {"--check"}),
        ("kv-offload simulate x --pol", {"--policies"}),
        ("kv-offload size Qwen/Qwen3-8B --kv-cache-dtype fp8_per", {"fp8_per_token_head"}),
    ],
)
def test_a_shell_completes_commands_options_and_values(tmp_path, line, completed):
    """As the function that `register-python-argcomplete` makes for bash calls it."""
    pytest.importorskip("argcomplete", reason="needs the extra `completion`")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "IFS": "\013"}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "completions")
    run_in_shell(tmp_path, COMMAND, **asked)
    found = (tmp_path / "completions").read_text().split("\013")
    assert completed <= {word.strip() for word in found}
