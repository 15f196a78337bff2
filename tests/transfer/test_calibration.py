"""The file that keeps a calibration: what it survives, and what the rule makes of it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kv_swap import calibrate, calibration
from kv_swap.calibration import Calibration, cache_file, read_cached, write_cached
from kv_swap.path_rule import MeasuredRule, OnlyPath

from tests.transfer.test_path_rule import KEY, make_calibration

DEVICE: Any = None
"""Stands for a device: what asks it for anything is replaced."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration._warned_of.clear()
    return tmp_path


@pytest.fixture
def measured() -> Calibration:
    return make_calibration(lambda path, *_: 60.0 if path == "dma" else 50.0)


def test_what_was_written_is_read_back(cache: Path, measured: Calibration) -> None:
    assert read_cached(KEY) is None
    path = write_cached(measured)
    assert path == cache_file(KEY)
    assert path.parent == cache / "kv-offload"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert read_cached(KEY) == measured


@pytest.mark.parametrize(
    "change",
    [
        {"name": "NVIDIA H100"},
        {"capability": (8, 0)},
        {"driver": "590.1, CUDA 13010"},
        {"link": "16.0 GT/s PCIe x 16"},
        {"measured_by": 99},
    ],
)
def test_another_device_or_version_finds_nothing(
    measured: Calibration, change: dict[str, Any]
) -> None:
    write_cached(measured)
    assert read_cached(replace(KEY, **change)) is None


def corrupt(document: dict[str, Any], what: str) -> bytes:
    points = document["points"]
    if what == "cut off":
        return json.dumps(document).encode()[:-20]
    if what == "of another key":
        document["key"]["name"] = "NVIDIA H100"
    elif what == "a point short":
        points.pop()
    elif what == "of a negative figure":
        points[3]["gbps"] = -1
    elif what == "of another type":
        points[3]["gbps"] = "fast"
    elif what == "of an unknown path":
        points[3]["path"] = "pigeon"
    else:
        return b"\xff\x00"
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "what",
    [
        "cut off",
        "of another key",
        "a point short",
        "of a negative figure",
        "of another type",
        "of an unknown path",
        "no JSON",
    ],
)
def test_a_bad_file_is_warned_of_once_and_replaced(
    measured: Calibration, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_cached(measured)
    assert path is not None
    path.write_bytes(corrupt(json.loads(path.read_bytes()), what))
    with caplog.at_level(logging.WARNING):
        assert read_cached(KEY) is None
        assert read_cached(KEY) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    write_cached(measured)
    assert read_cached(KEY) == measured


@pytest.mark.parametrize("obstacle", ["folder is a file", "file is a folder"])
def test_a_cache_that_cannot_be_written_is_warned_of_once(
    cache: Path, measured: Calibration, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    if obstacle == "folder is a file":
        (cache / "kv-offload").write_text("")
    else:
        (cache_file(KEY) / "full").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert write_cached(measured) is None
        assert write_cached(measured) is None
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    if obstacle == "file is a folder":
        assert [file.name for file in (cache / "kv-offload").iterdir()] == [cache_file(KEY).name]


def test_without_a_home_there_is_no_cache(
    measured: Calibration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert write_cached(measured) is None
        assert read_cached(KEY) is None
    assert "Could not determine home directory" in caplog.text


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_a_relative_cache_folder_is_ignored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert calibration.cache_folder() == Path("/home/somebody/.cache/kv-offload")


def test_the_rule_of_a_device(measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "describe", lambda device: KEY)
    monkeypatch.setattr(calibrate, "runs_kernels", lambda device: True)
    assert calibrate.rule_for(DEVICE) == OnlyPath("kernel")
    write_cached(measured)
    assert calibrate.rule_for(DEVICE) == MeasuredRule(measured)
    monkeypatch.setattr(calibrate, "runs_kernels", lambda device: False)
    assert calibrate.rule_for(DEVICE) == OnlyPath("dma")
