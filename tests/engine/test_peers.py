"""Engines of one pool serve what the others have computed, from the others' host memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.worker import pool
from tests.engine.harness import (
    Engine,
    all_differ,
    corrupt_arenas,
    full_blocks,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
)
from tests.support.processes import Process, stay, staying

PROMPTS = prompts_with_shared_prefix()
OTHERS = prompts_with_shared_prefix(seed=7)


def plugin(folder: Path) -> dict[str, Any]:
    return {
        "host_pool": "chat",
        "host_pool_path": str(folder),
        "load_or_recompute": "always_load",  # a small model computes faster
    }


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines neither take nor wait for another engine's seat."""
    monkeypatch.setattr(pool, "LOCK_SECONDS", 0.0)


def compute_and_stay(models: str, folder: str, seed: str, ready: str) -> None:
    """Answer prompts, and wait to be killed."""
    pool.LOCK_SECONDS = 0.0
    prompts = prompts_with_shared_prefix(seed=int(seed))
    with offloading(Path(models), plugin=plugin(Path(folder))) as running:
        running.generate(prompts)
        running.settle()
        assert len(running.offload.manager.readable_slots()) >= full_blocks(prompts)
        stay(ready)


@contextlib.contextmanager
def peer(models: Path, folder: Path, name: str, seed: int = 0) -> Iterator[Process]:
    """Run another engine of the pool, which has computed its prompts."""
    own = folder / name
    own.mkdir()
    words = ("tests.engine.test_peers", models, folder, seed)
    with staying(*words, folder=own, forks=True) as (process, _):
        yield process


def serve_from_peers(ours: Engine, prompts: list[Any], expected: list[Any]) -> None:
    """Serve prompts that this engine does not have; a peer has all of their blocks."""
    blocks = full_blocks(prompts)
    stored = len(ours.offload.manager.readable_slots())
    before = ours.totals["peers_read_bytes"], ours.totals["loaded_bytes"]
    assert ours.generate(prompts) == expected
    ours.settle()
    assert ours.totals["peers_read_bytes"] - before[0] >= blocks * ours.block_bytes
    assert ours.totals["loaded_bytes"] - before[1] >= blocks * ours.block_bytes
    assert len(ours.offload.manager.readable_slots()) == stored  # straight from the peer's memory
    assert ours.totals["promoted_bytes"] == 0
    assert ours.offload.gauges()["leased_slots"] == 0
    ours.offload.check_integrity()


def meet(ours: Engine, peers: int) -> None:
    """Make the ranks map the arenas of this many peers."""
    ours.settle()
    assert ours.offload.gauges()["peers"] == peers


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_two_engines_serve_what_a_third_computed(
    model_folder: Path, memory_folder: Path, what: signal.Signals
) -> None:
    """Even if it is killed or stopped. Another engine has computed, too, and continues to run."""
    expected = plain_answers(model_folder, PROMPTS)
    of_others = plain_answers(model_folder, OTHERS)
    with (
        peer(model_folder, memory_folder, "first") as first,
        peer(model_folder, memory_folder, "second", seed=7),
        offloading(model_folder, plugin=plugin(memory_folder)) as ours,
    ):
        assert ours.offload.gauges()["adopted_slots"] == 0
        meet(ours, 2)
        os.killpg(first.pid, what)
        serve_from_peers(ours, PROMPTS, expected)
        serve_from_peers(ours, OTHERS, of_others)
        if what == signal.SIGSTOP:
            os.killpg(first.pid, signal.SIGCONT)


def test_other_bytes_of_a_peer_change_the_answers(model_folder: Path, memory_folder: Path) -> None:
    """The control: what is served comes from the peer's memory."""
    expected = plain_answers(model_folder, PROMPTS)
    with (
        peer(model_folder, memory_folder, "first"),
        offloading(model_folder, plugin=plugin(memory_folder)) as ours,
    ):
        meet(ours, 1)
        corrupt_arenas(memory_folder)
        assert all_differ(ours.generate(PROMPTS), expected)


def test_after_a_reset_nothing_is_read_from_peers(model_folder: Path, memory_folder: Path) -> None:
    expected = plain_answers(model_folder, PROMPTS)
    with (
        peer(model_folder, memory_folder, "first"),
        offloading(model_folder, plugin=plugin(memory_folder)) as ours,
    ):
        meet(ours, 1)
        assert ours.llm.reset_prefix_cache(reset_connector=True)
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["peers_read_bytes"] == 0
        assert ours.offload.gauges()["peers"] == 0


if __name__ == "__main__":
    compute_and_stay(*sys.argv[1:])
