"""Run by `test_engine.py` in a separate process: one vLLM engine on a GPU, with and without us.

usage: python -m tests.gpu.engine_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

Prompts are answered one at a time: on a GPU a token's rounding depends on the rest of its batch,
and one flipped bit of bfloat16 can flip a token of a random model. For the same reason, answers
from host memory are compared with those that the engine without the plugin gives from its own
prefix cache: both compute the same tokens.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kv_swap.cuda import state
from kv_swap.engine import Direction, SwapJob

from kv_offload.engines.vllm.model import groups
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata
from kv_offload.scheduler.loads import decision
from kv_offload.worker import forward_loads, waves
from tests.engine.harness import (
    Drafts,
    Engine,
    draft_head,
    engine,
    prompts_with_shared_prefix,
    random_tokens,
)
from tests.engine.rank_calls import kv_memory, pages, poison
from tests.gpu.deepseek_v4 import use_portable_kernels
from tests.support.processes import be_run

PROMPTS = prompts_with_shared_prefix(shared=1500, tails=(21, 25, 40, 85, 36), seed=11)
"""The last one ends with a block of any tested size, so that all of it can be loaded."""
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 512 << 20,
    "gpu_memory_utilization": 0.1,  # must be free at the start; several engines share a GPU
}


def one_by_one(running: Engine) -> list[list[int]]:
    return [running.generate([prompt], max_tokens=16)[0] for prompt in PROMPTS]


class Loads:
    """Counts later loads, without the blocks in which a last token is recomputed."""

    def __init__(self, running: Engine) -> None:
        self.blocks: set[int] = set()
        self.in_waves: list[bool] = []
        self.whole = 0
        self._submit = running.rank.transfer.submit
        self._start = running.rank.start_copies
        self._started_for: OffloadMetadata | None = None
        running.rank.transfer.submit = self._note
        running.rank.start_copies = self._note_jobs

    def _note_jobs(self, metadata: OffloadMetadata, **asked: bool) -> None:
        self._start(metadata, **asked)
        if metadata is self._started_for:
            return
        self._started_for = metadata
        for job in metadata.loads:
            if job.whole:
                self.whole += 1
                self.blocks.discard(int(job.pairs[-1, 0]))

    def _note(self, job: SwapJob) -> None:
        if job.direction is Direction.LOAD:
            self.blocks.update(int(block) for block in job.pairs[:, 0])
            self.in_waves.append(job.in_waves)
        self._submit(job)


def digests(running: Engine, blocks: set[int] | None = None) -> dict[str, set[str]]:
    """Return the digests of all blocks in the engine's prefix cache, by key.

    With `blocks`, only of those. Reads whole pages through the regions that the transfer engine
    copies, over all layers. A key has several blocks if a prefix was computed more than once.
    """
    torch.cuda.synchronize()
    found: dict[str, set[str]] = {}
    for block in running.pool.blocks:
        if block.block_hash is not None and (blocks is None or block.block_id in blocks):
            digest = hashlib.sha256()
            for page in pages(running.rank, block.block_id):
                digest.update(page.cpu().numpy())
            found.setdefault(bytes(block.block_hash).hex(), set()).add(digest.hexdigest())
    return found


def corrupt(slots: np.ndarray, kind: str) -> None:
    """Change the content of host memory without making NaNs, which end runner V2."""
    if kind in ("jamba", "falcon_h1", "qwen3_next", "qwen3_next_mtp", "nemotron_h_mtp"):
        slots ^= 0x01  # exponents too; swapping states and keys would make NaNs
    elif kind == "deepseek_v4":
        slots[:] = 0  # with eight bits every change makes some value a NaN
    else:
        slots[:] = np.roll(slots, 7, axis=0)  # right bytes in wrong places


def still_alive(watched: dict[str, weakref.ref[Any]]) -> list[str]:
    """Return the KV tensors that something holds although their engine has ended."""
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


def answers_without_overlap(
    models: Path, kind: str, plugin: dict[str, Any], settings: dict[str, Any]
) -> list[list[int]]:
    """Answer from host memory as if no latent were made from tokens before those that it covers.

    Then the tokens before a hit that the compressors keep are not loaded, and their memory has
    other numbers.
    """
    groups.OVERLAPPING_WINDOW_TOKENS = 0
    with engine(models, kind, plugin, **settings) as wrong:
        one_by_one(wrong)
        wrong.settle()
        wrong.reset_gpu_cache()
        for memory in kv_memory(wrong.rank):
            memory.fill_(0x45)  # 3,000 in 16 and 32 bits; NaNs would end runner V2
        return one_by_one(wrong)


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    settings = {**SETTINGS, **arguments}
    synchronous_loads = settings.pop("synchronous_loads", False)
    plugin = {"pack_kv": settings.pop("pack_kv", False)}
    if settings.pop("gates", False):  # small pages would not get them
        state.choose_copies = lambda layout, device: "gates"
    if settings.pop("draft_head", False):
        settings["speculative_config"] = draft_head(Path(models))
    result: dict[str, Any] = {}
    if kind == "deepseek_v4":
        use_portable_kernels()
    forward_loads.WAVES_FROM_BYTES, waves.LEAST_WAVE_BYTES = 0, 1  # all of these loads are small
    decision.WHOLE_SECONDS = float("inf")  # even if other tests slow the steps down
    all_at_once = settings.pop("all_at_once", True)
    expects_own_cache = settings.pop("expects_own_cache", False)
    # Only one engine of a process can have the sleep mode.
    reference = {key: settings[key] for key in settings if key != "enable_sleep_mode"}
    with engine(Path(models), kind, **reference) as plain:
        drafts = Drafts(plain)
        computed = one_by_one(plain)
        drafts.take()
        result["expected"] = [computed, one_by_one(plain)]
        result["expected_drafts"] = drafts.take()
        watched = plain.watch_kv_tensors()
    result["kept_without_us"] = still_alive(watched)
    with engine(
        Path(models), kind, plugin, synchronous_loads=synchronous_loads, **settings
    ) as ours:
        groups = ours.scheduler.kv_cache_config.kv_cache_groups
        result["layers"] = sum(len(group.layer_names) for group in groups)
        result["packed_tiles"] = ours.rank.transfer.layout.num_tiles
        result["copies_with"] = ours.rank.transfer.copies_with
        lanes = ours.rank.transfer._state.lanes.values()
        result["output_copy_stream"] = any(
            lane.stream._output_copy_stream is not None for lane in lanes
        )
        computed = one_by_one(ours)
        if expects_own_cache:
            result["expected"] = [computed, one_by_one(ours)]
        ours.settle()
        before = digests(ours)
        ours.reset_gpu_cache()
        poison(None)
        loads = Loads(ours)
        drafts = Drafts(ours)
        reloaded = one_by_one(ours)
        result["drafts"] = drafts.take()
        result["answers"] = [computed, reloaded]
        result["loads"], result["loads_in_waves"] = len(loads.in_waves), sum(loads.in_waves)
        result["whole_loads"] = loads.whole
        result["loaded_blocks"] = ours.blocks_loaded()
        # Not of recomputed tokens, whose rounding depends on the rest of their chunk.
        after = digests(ours, loads.blocks)
        same = [key for key in after if key in before]
        result["compared_blocks"] = len(same)
        result["synchronous_loads"] = ours.totals["synchronous_loads"]
        result["different_blocks"] = sum(not after[key] <= before[key] for key in same)

        ours.reset_gpu_cache()
        if all_at_once:
            ours.generate(PROMPTS, max_tokens=64)  # only the books must balance
        ours.settle()
        if arguments.get("enable_sleep_mode"):
            ours.rank.ended = (
                OffloadWorkerMetadata  # their reports are awaited, as from other processes
            )
            for seed in range(77, 97):  # until a sleep finds a store in flight
                ours.generate([random_tokens(300, seed=seed)], max_tokens=1)
                result["pending_at_sleep"] = len(ours.offload.in_flight.pinned_blocks)
                if result["pending_at_sleep"]:
                    break
            ours.llm.sleep(level=1)
            ours.llm.wake_up()
            ours.totals.clear()
            result["after_sleep"] = [one_by_one(ours)]
            ours.settle()
            ours.reset_gpu_cache()
            result["after_sleep"].append(one_by_one(ours))
            result["loaded_after_sleep"] = ours.blocks_loaded()

        ours.reset_gpu_cache()
        assert ours.rank.transfer.wait(10)
        corrupt(ours.slots, kind)
        result["corrupted"] = one_by_one(ours)
        ours.assert_nothing_left()
        watched = ours.watch_kv_tensors()
    result["kept"] = still_alive(watched)
    if kind == "deepseek_v4":
        result["without_overlap"] = answers_without_overlap(Path(models), kind, plugin, settings)
    return result


if __name__ == "__main__":
    be_run(main, processes=False)
