"""Engines that share a store load what another one has computed. Faults of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_swap.tiers.region import FIRST_REGION_BYTES

from kv_offload.tiers import base
from tests.engine.harness import (
    BLOCK_TOKENS,
    all_differ,
    full_blocks,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
)
from tests.support.inputs import Tokens
from tests.support.mooncake import PATIENT, Master, environment, require_mooncake
from tests.support.patience import be_patient
from tests.support.processes import run_function
from tests.support.s3_server import BUCKET, S3Server, require_s3
from tests.support.slow import rest_is_slow

PROMPTS = prompts_with_shared_prefix()
FULL_BLOCKS = full_blocks(PROMPTS)


def sharing(remote: dict[str, Any]) -> dict[str, Any]:
    """Return the plugin's keys. Blocks in the store are loaded even if computing is faster."""
    return {"remote": {"bytes": "1GiB", **remote}, "load_or_recompute": "always_load"}


def shared(folder: Path) -> dict[str, Any]:
    return sharing({"kind": "folder", "path": str(folder)})


@pytest.fixture(
    # `test_mooncake.py` has engines with a Mooncake store in `make test`, and
    # `tests/transfer/tiers/test_remote_contract.py` has tiers of all kinds.
    params=rest_is_slow(["folder", "s3", "mooncake"])
)
def remote(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """The keys of a store of each kind."""
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        yield {"kind": "folder", "path": str(tmp_path / "shared")}
    elif request.param == "s3":
        require_s3()
        with S3Server(tmp_path / "served") as server:
            for name, value in server.variables.items():
                monkeypatch.setenv(name, value)
            yield {"kind": "s3", "url": f"s3://{BUCKET}/engines"}
    else:
        require_mooncake()
        for name, value in {**environment(), **PATIENT}.items():
            monkeypatch.setenv(name, value)
        with Master() as master:
            yield {"kind": "mooncake", "address": master.address, "bytes": "16MiB"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def expected(model_folder: Path) -> list[Tokens]:
    return plain_answers(model_folder, PROMPTS)


def answer_and_tell(models: str, keys: dict[str, Any]) -> list[Any]:
    """Answer the prompts with the store's blocks; then with changed bytes in host memory."""
    be_patient(pytest.MonkeyPatch())
    if keys["kind"] == "mooncake":
        require_mooncake()
        keys["bytes"] = 0
    with offloading(Path(models), plugin=sharing(keys)) as running:
        answers = running.generate(PROMPTS)
        cached, totals = running.cached_tokens, dict(running.totals)
        loaded = running.blocks_loaded()
        running.settle()
        corrupted = running.reload(PROMPTS, corrupted=True)
    return [answers, cached, loaded, totals, corrupted]


def test_what_one_engine_has_computed_another_one_loads(
    model_folder, remote, expected, monkeypatch
):
    """Ends with the control: changing the bytes read into host memory must be noticed."""
    be_patient(monkeypatch)
    with offloading(model_folder, plugin=sharing(remote)) as ours:
        assert ours.generate(PROMPTS) == expected
        ours.settle()
        assert ours.totals["demoted_slots"] >= FULL_BLOCKS
        assert ours.totals["tier_errors"] == 0
        answers, cached, loaded, totals, corrupted = run_function(
            answer_and_tell, model_folder, remote
        )
    assert answers == expected
    assert totals["promoted_slots"] == FULL_BLOCKS, totals
    assert totals["promoted_bytes"] > 0
    assert loaded > 0
    assert sum(cached) >= FULL_BLOCKS * BLOCK_TOKENS
    assert all_differ(corrupted, expected)


def test_torn_files_a_folder_that_is_away_and_one_without_objects_cost_computing(
    model_folder, folder, expected, monkeypatch
):
    be_patient(monkeypatch)
    monkeypatch.setattr(base, "FIRST_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(base, "LONGEST_PAUSE_SECONDS", 0.2)
    with offloading(model_folder, plugin=shared(folder)) as ours:
        assert ours.generate(PROMPTS) == expected
        ours.settle()
        objects = [path for path in folder.rglob("*") if path.is_file()]
        for path in objects[::2]:
            os.truncate(path, path.stat().st_size // 2)
        ours.forget_host_memory()
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["tier_mismatches"] > 0
        ours.settle()
        folder.rename(folder.with_name("away"))
        ours.forget_host_memory()
        assert ours.generate(PROMPTS) == expected
        assert not folder.exists()
        folder.with_name("away").rename(folder)
        for path in objects:
            path.unlink(missing_ok=True)
        ours.forget_host_memory()
        assert ours.generate(PROMPTS) == expected


def test_a_disk_and_a_folder_serve_together(model_folder, folder, tmp_path, expected, monkeypatch):
    """Blocks are read from the disk; those that it lacks, from the folder, after which it has them.

    Ends with the control: changing the bytes read into host memory must be noticed.
    """
    be_patient(monkeypatch)

    def both(disk: str) -> dict[str, Any]:
        return {**shared(folder), "disk": {"path": str(tmp_path / disk), "bytes": "64MiB"}}

    def read(ours: Any) -> tuple[float, float]:
        """Answer with nothing in host memory; return the bytes read from disk and folder."""
        ours.forget_host_memory()
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["late_promotions"] == 0
        ours.settle()
        return ours.totals["disk_read_bytes"], ours.totals["remote_read_bytes"]

    with offloading(model_folder, plugin=both("first")) as ours:
        assert ours.generate(PROMPTS) == expected
        ours.settle()
        written = ours.totals["disk_written_bytes"]
        assert ours.totals["remote_written_bytes"] == written > 0
        from_disk, from_folder = read(ours)
        assert (from_disk > 0, from_folder) == (True, 0)
        (file,) = (tmp_path / "first").rglob("rank-*.kv")
        stored = bytearray(file.read_bytes())
        for place in range(FIRST_REGION_BYTES, len(stored), 997):
            stored[place] ^= 0x10
        file.write_bytes(stored)
        from_disk, from_folder = read(ours)
        assert ours.totals["tier_mismatches"] > 0
        assert (from_disk, from_folder > 0) == (0, True)
    with offloading(model_folder, plugin=both("second")) as ours:
        assert ours.generate(PROMPTS) == expected
        ours.settle()
        assert ours.totals["remote_read_bytes"] > 0
        assert ours.totals["disk_written_bytes"] > 0
        from_disk, from_folder = read(ours)
        assert (from_disk > 0, from_folder) == (True, 0)
        assert ours.blocks_loaded() > 0
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)
