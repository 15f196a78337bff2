"""What doctor says of a folder, which it measures."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.config import trace_config
from kv_offload.config.disk_folder import rank_file, replica_folder
from kv_offload.config.host_memory import HostMemory
from kv_offload.tools.doctor import disk
from kv_offload.tools.doctor.report import Check
from tests.support.filesystems import as_another_user, in_memory
from tests.support.tier_bed import TierBed

GIB = 1 << 30


@pytest.fixture(autouse=True)
def little_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEASURED_BYTES", 8 << 20)


def checks(path: Path, size: str | None = None, replicas: int = 1) -> dict[str, Check]:
    keys = {} if size is None else {"disk": {"path": str(path), "bytes": size}}
    traced = trace_config(keys, {}, host=HostMemory(64 * GIB, "here"), replicas=replicas)
    return {check.name: check for check in disk.check_disk(path, traced, measures=True)}


def test_a_folder_is_measured(tmp_path):
    found = checks(tmp_path)
    assert list(found) == ["disk", "disk space", "disk access", "disk rate"]
    assert str(tmp_path) in found["disk"].found
    assert re.search(r"GB/s written, [\d.]+ GB/s read: [\d,]+ tokens/s", found["disk rate"].found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "replicas", "state"),
    [("1MiB", 1, "ok"), ("900TiB", 1, "problem"), ("600TiB", 2, "problem"), (None, 1, "ok")],
)
def test_the_space_of_all_replicas_is_compared(size, replicas, state, tmp_path):
    space = checks(tmp_path, size, replicas)["disk space"]
    assert space.state == state
    assert (space.needed == "1200 TiB for disk.bytes") == (replicas == 2)


def test_space_that_an_engine_has_taken_is_its_own(tmp_path):
    for replica in range(2):
        replica_folder(tmp_path, replica).mkdir(exist_ok=True)
        with TierBed(rank_file(replica_folder(tmp_path, replica), 0), 64):
            pass
    space = checks(tmp_path)["disk space"]
    assert re.search(r"and files of kv-offload have 2\.[56]\d* MiB$", space.found)


def test_a_file_with_the_name_of_a_replica_is_none(tmp_path):
    replica_folder(tmp_path, 1).write_text("a note")
    assert checks(tmp_path, "1MiB")["disk space"].state == "ok"


def test_a_replica_of_another_user():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        replica_folder(Path(folder), 1).mkdir(0o700)
        with as_another_user():
            space = checks(Path(folder), "1MiB")["disk space"]
    assert space.state == "not checked"
    assert "Permission denied" in space.found
    assert space.remedy == "Run doctor as the user that runs the engine."


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A filesystem in memory, of 4 MiB."""
    with in_memory(tmp_path / "memory", "4m") as folder:
        yield folder


def test_a_folder_in_memory_is_a_warning(memory):
    found = checks(memory, "1GiB")
    assert found["disk"].state == "warning"
    assert found["disk"].remedy.startswith("It is memory")
    assert found["disk space"].state == "problem"


def test_the_space_of_the_folder_that_is_named_is_compared(memory, tmp_path):
    traced = trace_config({"disk": {"path": str(tmp_path), "bytes": "16MiB"}}, {})
    found = {check.name: check for check in disk.check_disk(memory, traced, measures=False)}
    assert found["disk space"].state == "problem"


def test_a_folder_that_the_engine_makes_is_measured_in_the_one_above(tmp_path):
    found = checks(tmp_path / "new", "1MiB")
    assert {check.state for check in found.values()} <= {"ok", "warning"}
    assert found["disk"].found.endswith("; an engine makes the folder")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_the_engine_would_not_make_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "gone" / "kv", tmp_path / "file"):
        found = checks(path)
        assert [check.state for check in found.values()] == ["problem"]
        assert "the folder cannot be created or used" in found["disk"].found


def test_access_through_the_kernel_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", 65536 + 16)  # no filesystem takes them directly
    access = checks(tmp_path)["disk access"]
    assert (access.state, access.found) == ("warning", "through the kernel's page cache")
    assert "does not allow direct access" in access.remedy


def test_the_disk_of_the_configuration_is_checked_or_the_one_that_is_named(
    tmp_path, command, monkeypatch
):
    def report(*words: str) -> dict[str, Any]:
        found = json.loads(command("doctor", "--json", *words).out)["checks"]
        return {check["name"]: check for check in found if check["section"] == "Disk"}

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "kv.yaml"
    file.write_text("cpu_bytes: 1MiB")
    assert report(str(file), "--no-measure") == {}
    file.write_text(f"cpu_bytes: 1MiB\ndisk: {{path: {tmp_path}, bytes: 1MiB}}")
    assert report(str(file))["disk space"]["needed"] == "1 MiB for disk.bytes"
    gone = str(tmp_path / "gone" / "kv")
    assert gone in report("--disk", gone)["disk"]["found"]
    unmeasured = report(str(file), "--no-measure")
    assert {name: line["state"] for name, line in unmeasured.items()} == {
        "disk": "ok",
        "disk space": "ok",
        "disk rate": "not checked",
    }
    gone_unmeasured = report("--disk", gone, "--no-measure")
    assert gone_unmeasured["disk"]["state"] == "problem"


def test_the_page_explains_every_line(tmp_path):
    page = Path(__file__).parents[4] / "docs/use/doctor.md"
    explained = set(re.findall(r"^\| ([^|]+?) \|", page.read_text(), re.MULTILINE))
    assert {*checks(tmp_path)} <= explained
