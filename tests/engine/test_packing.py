"""Packed KV: a real model computes with what is unpacked, which is the same bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.packing import samples
from kv_swap.packing.format import MANTISSA_BYTES, PACKED_TILE_BYTES
from kv_swap.packing.slots import SlotPacker
from vllm import LLM

from kv_offload.worker.copies import Stores
from tests.engine import multiprocess_run, pool_run
from tests.engine.harness import (
    Engine,
    Tokens,
    all_differ,
    engine,
    engine_settings,
    greedy,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
)
from tests.engine.multiprocess_run import PIPELINE, ask
from tests.support.inputs import transfer_config
from tests.support.latents import LATENT
from tests.support.patience import be_patient
from tests.support.processes import run_function, run_module, shut_down
from tests.support.totals import figures
from tests.support.waiting import wait_until

BLOCK_TOKENS = 128
"""Pages of 16 KiB for keys and as much for values."""

RANKS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": 256,
    "prompt_tokens": (513, 769, 1025),
    "plugin": {"pack_kv": True},
}
"""For ranks in separate processes. Each of two ranks that share the heads has such pages."""

PROMPTS = prompts_with_shared_prefix(600, (60, 140, 210))
PACKS = {"pack_kv": True}
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "block_size": BLOCK_TOKENS}


def packing(models: Path, kind: str = "qwen3", **more: Any) -> Any:
    """Start an engine that packs."""
    plugin = {**PACKS, **more.pop("plugin", {})}
    return offloading(models, kind, plugin, **SETTINGS, **more)


def expected(models: Path, kind: str = "qwen3") -> list[Tokens]:
    return plain_answers(models, PROMPTS, kind, one_by_one=True, **SETTINGS)


def answers(running: Engine) -> list[Tokens]:
    return running.generate_each(PROMPTS)


def corrupt(running: Engine) -> None:
    """Change sign and mantissa of each packed value, and nothing else of a tile."""
    layout = running.rank.transfer.layout
    for region in layout.regions:
        for tile in range(region.num_tiles):
            start = region.slot_offset_bytes + tile * PACKED_TILE_BYTES
            running.slots[:, start : start + MANTISSA_BYTES] ^= 0xFF


@pytest.mark.parametrize(
    ("kind", "synchronous_loads"),
    # Loads of several groups, as gemma3 has them, are never synchronous.
    [("qwen3", False), ("qwen3", True), ("gemma3", False)],
)
def test_packed_blocks_serve_as_they_were(model_folder, kind, synchronous_loads, monkeypatch):
    """Ends with the control: changed bits in host memory are noticed."""
    monkeypatch.setattr(samples, "SAMPLED_TILES", 1)
    plain = expected(model_folder, kind)
    with packing(model_folder, kind, synchronous_loads=synchronous_loads) as ours:
        layout = ours.rank.transfer.layout
        assert all(region.packing is not None for region in layout.regions)
        assert layout.slot_bytes < 0.85 * layout.block_bytes
        assert ours.offload.gauges()["slot_bytes"] == layout.slot_bytes
        assert ours.offload.gauges()["block_bytes"] == layout.block_bytes
        assert ours.offload.manager.num_slots == ours.rank.num_slots
        assert answers(ours) == plain
        assert ours.reload(PROMPTS, one_by_one=True) == plain
        assert ours.totals["skipped_unpackable"] == ours.totals["sampled_raw_tiles"] == 0
        assert ours.totals["sampled_tiles"] == ours.blocks_stored() * layout.num_tiles
        ours.forget()
        corrupt(ours)
        assert all_differ(answers(ours), plain)
        assert ours.blocks_loaded() > 0


@pytest.mark.usefixtures("cached_latents")
def test_packed_latents_and_what_is_left_of_their_pages(model_folder):
    """A page has a tile and 2 KiB more, which are not packed. Ends with the control."""
    prompts = [random_tokens(count, seed=count) for count in (129, 193)]
    settings = {**LATENT, "dtype": "bfloat16"}
    with engine(model_folder, "deepseek_v2", **settings) as plain:
        computed, cached = (plain.generate_each(prompts) for _ in range(2))
    with offloading(model_folder, "deepseek_v2", PACKS, **settings) as ours:
        regions = ours.rank.transfer.layout.regions
        assert all(r.num_tiles == 1 and r.raw_part is not None for r in regions)
        assert ours.generate_each(prompts) == computed
        assert ours.reload(prompts, one_by_one=True) == cached
        assert ours.totals["skipped_unpackable"] == 0
        ours.forget()
        corrupt(ours)
        assert all_differ(ours.generate_each(prompts), cached)


def refuse_every_third_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pack, packed = SlotPacker.pack, 0

    def refuse(self: SlotPacker, pages: Any, slots: np.ndarray) -> np.ndarray:
        nonlocal packed
        refused = pack(self, pages, slots)
        refused[(packed + np.arange(len(refused))) % 3 == 2] = True
        packed += len(refused)
        slots[refused, :MANTISSA_BYTES] ^= 0xFF
        return refused

    monkeypatch.setattr(SlotPacker, "pack", refuse)


def test_what_does_not_fit_is_computed(model_folder, monkeypatch):
    """Ends with the control: treating refused blocks as stored would be noticed."""
    plain = expected(model_folder)
    refuse_every_third_block(monkeypatch)
    with packing(model_folder) as ours:
        assert answers(ours) == plain
        refused = ours.totals["skipped_unpackable"]
        assert refused > 1
        assert ours.totals["stored_slots"] > refused
        assert ours.reload(PROMPTS, one_by_one=True) == plain
    ended = Stores.ended

    def forgetful(self: Stores, done: Any) -> None:
        object.__setattr__(done, "refused_rows", ())
        ended(self, done)

    monkeypatch.setattr(Stores, "ended", forgetful)
    with packing(model_folder) as careless:
        assert answers(careless) == plain
        assert careless.reload(PROMPTS, one_by_one=True) != plain


def test_a_disk_keeps_packed_slots_over_a_restart(model_folder, tmp_path):
    """An engine that does not pack finds nothing there."""
    plain = expected(model_folder)
    disk = {"disk": {"path": str(tmp_path), "bytes": "64MiB"}}
    with packing(model_folder, plugin=disk) as first:
        assert answers(first) == plain
        first.settle()
        written = first.offload.gauges()["tier_slots_in_use"]
        assert written > 0
    with packing(model_folder, plugin=disk) as second:
        assert second.offload.gauges()["tier_slots_in_use"] == written
        assert answers(second) == plain
        assert second.totals["promoted_slots"] > 0
        assert second.totals["tier_mismatches"] == 0
        assert second.blocks_loaded() > 0
        second.forget()
        corrupt(second)
        assert all_differ(answers(second), plain)
    with offloading(model_folder, plugin=disk, **SETTINGS) as raw:
        assert raw.offload.gauges()["tier_slots_in_use"] == 0
        assert answers(raw) == plain


@pytest.mark.slow  # `test_packed_blocks_serve_as_they_were` has one rank in `make test`
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, PIPELINE], ids=["TP", "PP"])
def test_ranks_in_processes_of_their_own(model_folder, split):
    """Ends with the control: blocks that change places in host memory are noticed."""
    words = ("tests.engine.multiprocess_run", model_folder, "qwen3", {**RANKS, **split})
    run = run_module(*words, forks=True)
    multiprocess_run.check(run, ranks=2, packs=True)


def check_restarted(result: dict[str, Any], ranks: int) -> None:
    """Check that every rank loaded packed blocks from its disk; ends with the control."""
    computed, cached = result["expected"]
    multiprocess_run.assert_same(result["computed"], computed)
    multiprocess_run.assert_same(result["restarted"], cached)
    assert [rank["rank"] for rank in result["ranks"]] == list(range(ranks))
    for rank in result["ranks"]:
        assert rank["slot_bytes"] < 0.9 * rank["block_bytes"]
    assert len({len(rank["blocks"]) for rank in result["loaded"]}) == 1
    blocks = len(result["loaded"][0]["blocks"])
    assert blocks >= 8
    assert result["figures"]["promoted_slots"] == result["written"] >= blocks
    assert result["figures"]["tier_mismatches"] == 0
    assert all_differ(result["corrupted"]["tokens"], computed["tokens"])


def wait_until_written(llm: Any, sampling: Any, blocks: int) -> int:
    """Step the engine until its disk has this many blocks; return how many it has."""

    def is_written() -> bool:
        ask(llm, [random_tokens(3, seed=0)], sampling)
        told = figures(llm)
        return told.get("tier_slots_in_use", 0) >= blocks and not told.get("demoting_slots")

    wait_until(is_written, lambda: figures(llm))
    return int(figures(llm)["tier_slots_in_use"])


def start_twice(models: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run ranks with a disk, twice: the second engine learns of the first only from the disk."""
    # However busy the machine is. The engines' processes are forked, and inherit this.
    be_patient(pytest.MonkeyPatch())
    plugin, prompt_tokens = arguments.pop("plugin"), arguments.pop("prompt_tokens")
    settings = engine_settings(Path(models), "qwen3", disable_log_stats=False, **arguments)
    prompts = [random_tokens(count, seed=count) for count in prompt_tokens]
    blocks = sum((count - 1) // settings["block_size"] for count in prompt_tokens)
    sampling = greedy(8)
    (expected,) = multiprocess_run.plain_answers(settings, [prompts], sampling)
    settings["kv_transfer_config"] = transfer_config(plugin)
    result: dict[str, Any] = {"expected": expected}
    llm = LLM(**settings)
    result["computed"] = ask(llm, prompts, sampling)
    result["written"] = wait_until_written(llm, sampling, blocks)
    shut_down(llm)
    return result | pool_run.start_again(settings, prompts)


@pytest.mark.slow  # `test_a_disk_keeps_packed_slots_over_a_restart` has one rank in `make test`
def test_ranks_find_packed_slots_on_their_disks_after_a_restart(model_folder, tmp_path):
    """Ends with the control: blocks that change places in host memory are noticed."""
    disk = {"disk": {"path": str(tmp_path), "bytes": "64MiB"}, "load_or_recompute": "always_load"}
    arguments = {**RANKS, "plugin": {**RANKS["plugin"], **disk}, "tensor_parallel_size": 2}
    check_restarted(run_function(start_twice, model_folder, arguments, processes=True), ranks=2)


def test_what_nothing_can_be_packed_of_is_said_and_served(model_folder, caplog):
    prompts = prompts_with_shared_prefix()
    plain = plain_answers(model_folder, prompts)
    with offloading(model_folder, plugin=PACKS) as ours:
        assert "nothing is packed" in caplog.text
        assert "this cache has float32 in pages of" in caplog.text
        layout = ours.rank.transfer.layout
        assert layout.slot_bytes == layout.block_bytes
        assert ours.generate(prompts) == plain
        assert ours.reload(prompts) == plain
