"""Blocks that left host memory are read from a disk, also by a restarted engine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.errors import TierError
from kv_swap.tiers.disk import DiskMover, DiskTier
from kv_swap.tiers.engine import TierDirection
from kv_swap.tiers.region import FIRST_REGION_BYTES
from kv_swap.tiers.workers import MoveResult
from safetensors.torch import load_file, save_file
from vllm import LLM

from kv_offload.cache.disk_index import index
from kv_offload.engines.vllm.patches import reset_prefix_cache
from kv_offload.errors import ConfigError
from kv_offload.tiers import promoter
from tests.engine.harness import (
    BLOCK_TOKENS,
    all_differ,
    engine_settings,
    full_blocks,
    greedy,
    noted_blocks,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    refusal,
    wait_until_noted,
)
from tests.engine.multiprocess_run import ask
from tests.engine.test_new_weights import CHANGED, changed
from tests.support.inputs import random_tokens, transfer_config
from tests.support.patience import be_patient
from tests.support.processes import print_result, run_function, shut_down, stay, staying
from tests.support.slow import rest_is_slow
from tests.support.small_models import write_model
from tests.support.waiting import wait_until

PROMPTS = prompts_with_shared_prefix()
FULL_BLOCKS = full_blocks(PROMPTS)


def disk(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the plugin's keys. Blocks on the disk are loaded even if computing is faster."""
    keys = {"path": str(folder), "bytes": "64MiB", **more}
    return {"disk": keys, "load_or_recompute": "always_load"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def write_and_stay(models: str, folder: str, ready: str) -> None:
    """Answer prompts, and wait to be killed once the index can list the blocks on the disk."""
    with offloading(Path(models), plugin=disk(Path(folder))) as running:
        running.generate(PROMPTS)
        running.settle()
        assert running.offload.gauges()["demoting_slots"] == 0
        wait_until_noted(running, folder)
        stay(ready)


def test_what_was_on_disk_serves_after_kill_9(model_folder, tmp_path):
    expected = plain_answers(model_folder, PROMPTS)
    place = tmp_path / "disk"
    place.mkdir()
    words = ("tests.engine.test_disk", model_folder, place)
    with staying(*words, folder=tmp_path, forks=True) as (process, _):
        assert process.poll() is None
    with offloading(model_folder, plugin=disk(place)) as ours:
        assert ours.offload.gauges()["tier_slots_in_use"] >= FULL_BLOCKS
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["promoted_slots"] >= 0.95 * FULL_BLOCKS
        assert ours.totals["tier_mismatches"] == 0
        assert ours.blocks_loaded() > 0
        for prompt, cached in zip(PROMPTS, ours.cached_tokens, strict=True):
            assert cached >= (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("kind", "plugin"), [("qwen3", {}), ("gemma3", {"eviction_policy": "lru"})]
)
def test_the_disk_serves_what_host_memory_forgot(model_folder, tmp_path, kind, plugin):
    """Ends with the control: changing the bytes read into host memory must be noticed."""
    expected = plain_answers(model_folder, PROMPTS, kind)
    with offloading(model_folder, kind, {**disk(tmp_path), **plugin}) as ours:
        assert ours.generate(PROMPTS) == expected
        ours.forget_host_memory()
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["promoted_slots"] > 0
        assert ours.blocks_loaded() > 0
        ours.settle()
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)


def test_flipped_bits_are_misses(model_folder, tmp_path):
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, plugin=disk(tmp_path)) as ours:
        ours.generate(PROMPTS)
        ours.forget_host_memory()
        (file,) = tmp_path.glob("rank-*.kv")
        stored = bytearray(file.read_bytes())
        for place in range(FIRST_REGION_BYTES, len(stored), 997):
            stored[place] ^= 0x10
        file.write_bytes(stored)
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["tier_mismatches"] > 0
        assert ours.totals["promoted_slots"] == 0
        assert ours.blocks_loaded() == 0


def test_a_folder_that_another_engine_uses_is_refused(model_folder, tmp_path):
    arena = np.zeros((1, 4096), np.uint8)
    with DiskTier(tmp_path / "rank-0.kv", 1, arena, {}):
        said = refusal(model_folder, ConfigError, plugin=disk(tmp_path))
    assert "disk.path" in said
    assert "in use by another engine" in said


def test_a_disk_that_takes_its_time_is_not_waited_for(model_folder, tmp_path, monkeypatch):
    """Reads take a hundred times as long as a request waits at most."""
    expected = plain_answers(model_folder, PROMPTS)
    monkeypatch.setattr(promoter, "MAX_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(promoter, "MIN_WAIT_SECONDS", 0.02)
    read = os.preadv

    def read_slowly(*arguments: Any) -> int:
        time.sleep(2)
        return read(*arguments)

    with offloading(model_folder, plugin=disk(tmp_path)) as ours:
        assert ours.generate(PROMPTS) == expected
        ours.forget_host_memory()
        monkeypatch.setattr(os, "preadv", read_slowly)
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["late_promotions"] > 0
        monkeypatch.setattr(os, "preadv", read)


def fail_first_write(failed: Path) -> None:
    """Make the first write of a process forked later fail and create a file."""
    move = DiskMover.move

    def fail_or_move(mover: DiskMover, direction: TierDirection, rows: Any) -> MoveResult:
        if direction is TierDirection.PROMOTE or failed.exists():
            return move(mover, direction, rows)
        failed.touch()
        outcome = MoveResult()
        for row in rows:
            outcome.fail(row, TierError("injected fault"))
        return outcome

    DiskMover.move = fail_or_move  # type: ignore[method-assign]


def store_beside_a_failed_write(models: str, folder: str) -> list[int]:
    """Leave an engine idle after its first write has failed.

    Return how many blocks were stored while nothing was written, and how many are written later.
    """
    failed = Path(folder).with_name("failed")
    pytest.MonkeyPatch().setattr("kv_offload.tiers.base.FIRST_PAUSE_SECONDS", 1.5)
    fail_first_write(failed)
    settings = engine_settings(Path(models), "qwen3")
    llm = LLM(**settings, kv_transfer_config=transfer_config(disk(Path(folder))))
    first, second = (random_tokens(257, seed) for seed in (1, 2))
    ask(llm, [first], greedy(1))
    wait_until(failed.exists)
    time.sleep(0.5)  # the engine notices the failure
    ask(llm, [second], greedy(1))
    blocks = (len(second) - 1) // settings["block_size"]
    wait_until(lambda: noted_blocks(Path(folder)) >= blocks)
    written = noted_blocks(Path(folder))
    shut_down(llm)
    return [blocks, written]


def test_an_idle_engine_writes_after_a_pause_what_came_in_it(model_folder, tmp_path):
    """The engine core sleeps in a separate process; no request wakes it."""
    arguments = store_beside_a_failed_write, model_folder, tmp_path / "disk"
    blocks, written = run_function(*arguments, processes=True)
    assert written >= blocks > 0


def test_a_reset_and_new_weights_empty_the_disk(model_folder, tmp_path):
    with offloading(model_folder, plugin=disk(tmp_path)) as ours:
        ours.generate(PROMPTS)
        ours.settle()
        assert ours.offload.gauges()["tier_slots_in_use"] > 0
        assert ours.llm.reset_prefix_cache(reset_connector=True)
        assert ours.offload.gauges()["tier_slots_in_use"] == 0
    with offloading(model_folder, plugin=disk(tmp_path, keep_on_reset=True)) as ours:
        assert ours.offload.gauges()["tier_slots_in_use"] == 0  # of unknown weights
        ours.generate(PROMPTS)
        ours.settle()
        kept = ours.offload.gauges()["tier_slots_in_use"]
        assert ours.llm.reset_prefix_cache(reset_connector=True)
        assert ours.offload.gauges()["tier_slots_in_use"] == kept > 0
        ours.offload.resets.weights_change()
        assert ours.offload.gauges()["tier_slots_in_use"] == 0


def write_new_weights(folder: Path, weights: Path) -> None:
    """Write weights that differ from a model's into a file of the same size and time."""
    old = folder / "model.safetensors"
    save_file(changed(old), weights, metadata={"format": "pt"})
    found = old.stat()
    assert weights.stat().st_size == found.st_size
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))


FAULTS: dict[str, Any] = {
    "the index hangs": lambda: setattr(index, "end_index", lambda *_: time.sleep(3600)),
    "the rank fails": lambda: setattr(DiskTier, "revoke", lambda *_: "injected fault"),
}


def reset_and_die(models: str, folder: str, faults: list[str], weights: str) -> None:
    """Give an engine new weights, reset it, and die by SIGKILL as soon as the reset returns."""
    with offloading(Path(models), plugin=disk(Path(folder))) as running:
        running.generate(PROMPTS)
        running.settle()
        assert running.offload.gauges()["demoting_slots"] == 0
        wait_until_noted(running, folder)
        for fault in faults:
            FAULTS[fault]()
        if len(faults) == 2:  # without either proof, waiting is pointless
            pytest.MonkeyPatch().setattr(reset_prefix_cache, "SETTLE_SECONDS", 0.5)
        model = running.llm.llm_engine.model_executor.driver_worker.model_runner.model
        # Like a broadcast into the model's tensors, which cannot be noticed.
        tensors = load_file(weights)
        type(model).load_weights(model, ((name, tensors[name]) for name in CHANGED))
        print_result(running.llm.reset_prefix_cache(reset_connector=True))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "faults",
    # `tests/kv_offload/cache/test_disk_proofs.py` has each in `make test`.
    rest_is_slow(
        [["the index hangs", "the rank fails"], ["the index hangs"], ["the rank fails"]], 2
    ),
)
def test_a_reset_that_was_answered_with_true_holds_though_the_engine_is_killed_at_once(
    model_folder, tmp_path, faults
):
    """The new weights are in the model's folder and cannot be distinguished from the old ones.

    The index and the data file each prevent the next engine from serving KV of the old ones. In the
    control both have failed: the reset returns False, and the next engine serves old KV.
    """
    models = tmp_path / "models"
    shutil.copytree(write_model("qwen3", model_folder / "qwen3"), models / "qwen3")
    place, weights = tmp_path / "disk", tmp_path / "new.safetensors"
    place.mkdir()
    write_new_weights(models / "qwen3", weights)
    answered = run_function(reset_and_die, models, place, faults, weights)
    weights.rename(models / "qwen3" / "model.safetensors")
    expected = plain_answers(models, PROMPTS)
    with offloading(models, plugin=disk(place)) as ours:
        answers = ours.generate(PROMPTS)
        promoted = ours.totals["promoted_slots"]
    if len(faults) == 1:
        assert answered is True
        assert (answers, promoted) == (expected, 0)
    else:
        assert answered is False
        assert promoted > 0
        assert all_differ(answers, expected)


if __name__ == "__main__":
    write_and_stay(*sys.argv[1:])
