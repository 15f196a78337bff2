"""A restarted engine serves what the previous one left in host memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_offload.errors import ConfigError
from tests.engine import pool_run
from tests.engine.harness import (
    BLOCK_TOKENS,
    all_differ,
    full_blocks,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    refusal,
)
from tests.support.latents import LATENT
from tests.support.processes import kill_group, run_module, stay, staying
from tests.support.slow import rest_is_slow

PROMPTS = prompts_with_shared_prefix()
FULL_BLOCKS = full_blocks(PROMPTS)


def pool(folder: Path, name: str = "chat", **more: Any) -> dict[str, Any]:
    return {"host_pool": name, "host_pool_path": str(folder), **more}


def compute_and_stay(models: str, folder: str, ready: str) -> None:
    """Answer prompts, and wait to be killed; return how many slots are readable."""
    with offloading(Path(models), plugin=pool(Path(folder))) as running:
        running.generate(PROMPTS)
        running.settle()
        stay(ready, len(running.offload.manager.readable_slots()))


@pytest.fixture
def left(model_folder: Path, memory_folder: Path) -> int:
    """The number of readable slots in a pool whose engine was killed."""
    words = ("tests.engine.test_host_pool", model_folder, memory_folder)
    with staying(*words, folder=memory_folder, forks=True) as (_, said):
        readable = int(said)
    assert readable >= FULL_BLOCKS
    return readable


def test_an_engine_serves_what_one_that_was_killed_left(
    model_folder: Path, memory_folder: Path, left: int
) -> None:
    """Ends with the control: changing the bytes that were left must be noticed."""
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, plugin=pool(memory_folder)) as ours:
        assert ours.offload.gauges()["adopted_slots"] >= 0.95 * left
        ours.offload.check_integrity()
        assert ours.generate(PROMPTS[:1]) == expected[:1]
        assert ours.blocks_stored() == 0
        for prompt, cached in zip(PROMPTS[:1], ours.cached_tokens, strict=True):
            assert cached >= (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert ours.generate(PROMPTS) == expected
        assert ours.blocks_loaded() >= 0.95 * FULL_BLOCKS
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)


def test_another_namespace_or_layout_adopts_nothing_and_leaves_the_pool_as_large(
    model_folder: Path, memory_folder: Path, left: int
) -> None:
    expected = plain_answers(model_folder, PROMPTS)
    others: list[dict[str, Any]] = [
        {"plugin": pool(memory_folder, "other")},
        {"plugin": pool(memory_folder, cpu_bytes="48MiB")},
        {"plugin": pool(memory_folder), "seed": 1, "max_model_len": 1024},
    ]
    for arguments in others:
        with offloading(model_folder, **arguments) as ours:
            assert ours.offload.gauges()["adopted_slots"] == 0
            assert ours.generate(PROMPTS) == expected
            assert ours.blocks_loaded() == 0
    assert len([*memory_folder.glob("kv-offload-*/chat/seat-*")]) == 1
    assert len([*memory_folder.glob("kv-offload-*/chat/seat-*/rank-*")]) == 1


@pytest.mark.parametrize("weights", rest_is_slow([False, True]))
def test_after_a_reset_or_new_weights_nothing_is_adopted(
    model_folder: Path, memory_folder: Path, left: int, weights: bool
) -> None:
    """Nor is what was computed since, because another process has the weights of its own start."""
    with offloading(model_folder, plugin=pool(memory_folder)) as ours:
        assert ours.offload.gauges()["adopted_slots"] >= 0.95 * left
        if weights:
            ours.offload.resets.weights_change()
        else:
            assert ours.llm.reset_prefix_cache(reset_connector=True)
        ours.generate(PROMPTS)
        ours.settle()
        assert len(ours.offload.manager.readable_slots()) >= FULL_BLOCKS
    with offloading(model_folder, plugin=pool(memory_folder)) as ours:
        assert ours.offload.gauges()["adopted_slots"] == 0


@pytest.mark.slow  # `tests/kv_offload/test_host_pool.py` has ranks of a pool in `make test`
@pytest.mark.parametrize(
    ("kind", "more", "sharing"), [("deepseek_v2", LATENT, 2), ("qwen3", {}, 1)]
)
@pytest.mark.parametrize("from_peers", [False, True])
def test_ranks_serve_what_ranks_that_were_killed_left_or_that_run(
    model_folder: Path,
    memory_folder: Path,
    kind: str,
    more: dict[str, Any],
    sharing: int,
    from_peers: bool,
) -> None:
    """Ranks with latent attention share one arena. Ends with the control: blocks change places."""
    plugin = pool(memory_folder, cpu_bytes="8MiB", load_or_recompute="always_load")
    arguments = {"tensor_parallel_size": 2, "plugin": plugin, **more}
    words = ("tests.engine.pool_run", model_folder, kind, json.dumps(arguments))
    with staying(*words, folder=memory_folder, forks=True) as (process, _):
        assert process.poll() is None
        if not from_peers:
            kill_group(process)
        run = run_module("tests.engine.pool_run", model_folder, kind, arguments, forks=True)
    pool_run.check(run, ranks=2, sharing=sharing, from_peers=from_peers)


def test_a_pool_that_others_could_have_written_is_refused(
    model_folder: Path, memory_folder: Path
) -> None:
    with offloading(model_folder, plugin=pool(memory_folder)):
        (folder,) = memory_folder.glob("kv-offload-*")
    folder.chmod(0o755)
    said = refusal(model_folder, ConfigError, plugin=pool(memory_folder))
    assert "host_pool" in said
    assert "0700" in said


if __name__ == "__main__":
    compute_and_stay(*sys.argv[1:])
