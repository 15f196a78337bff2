"""How long blocks that a prompt gets lie next to each other, while an engine grows old.

usage: python -m bench.block_runs [--requests N] [--out FILE.json]

Where neighbours among a prompt's GPU blocks are neighbours in host memory too, one copy of the copy
engine moves many of them. vLLM's own KV cache manager gives and takes the blocks here, of requests
with prompts and answers of random lengths; nobody computes. Reported is which share of prompts'
blocks lies in runs of at least 16: of consecutive ids in any order, which is what a store could use
if slots were chosen for it, and in the order of the prompt, which is what a load could use.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from bench.scheduler_bed import BLOCK_TOKENS, TOKEN, make_request, make_scheduler
from bench.serving_report import table
from bench.swap_rows import machine, vllm_module

LEAST_RUN = 16
WINDOWS = ((0.0, 0.02), (0.02, 0.1), (0.1, 0.2), (0.4, 0.6), (0.9, 1.0))


@dataclass(frozen=True)
class Traffic:
    """So many requests at a time, with log-normal prompts and exponential answers."""

    gpu_blocks: int
    running: int
    prompt_tokens: int
    answer_tokens: int


TRAFFIC = (
    Traffic(50_000, 64, 1_000, 300),
    Traffic(50_000, 64, 4_000, 300),
    Traffic(50_000, 16, 16_000, 200),
)


def in_runs(block_ids: NDArray[np.int64]) -> float:
    """Return the share of blocks in runs of `LEAST_RUN` or more of which each id follows one."""
    runs = np.split(block_ids, np.flatnonzero(np.diff(block_ids) != 1) + 1)
    return sum(len(run) for run in runs if len(run) >= LEAST_RUN) / len(block_ids)


def grow_old(traffic: Traffic, requests: int) -> list[tuple[float, float, int]]:
    """Serve requests; return the shares of each prompt, unordered and in order, and its blocks."""
    longest = 16 * traffic.prompt_tokens
    scheduler = make_scheduler(traffic.gpu_blocks, 2 * longest, {})
    manager = scheduler.kv_cache_manager
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(traffic.prompt_tokens), 0.8, requests), 32, longest)
    answers = rng.exponential(traffic.answer_tokens, requests).astype(int)
    found = []
    running: list[tuple[Request, int]] = []
    for number in range(requests):
        request = make_request(f"r{number}", number + 1, int(prompts[number]), 1 << 30)
        while len(running) == traffic.running or not manager.allocate_slots(
            request, request.num_tokens
        ):
            running = [one for one in running if decode(manager, *one)]
        ids = np.array(manager.get_block_ids(request.request_id)[0])
        found.append((in_runs(np.sort(ids)), in_runs(ids), len(ids)))
        request.num_computed_tokens = request.num_tokens
        running.append((request, request.num_tokens + answers[number]))
    return found


def decode(manager: KVCacheManager, request: Request, end_tokens: int) -> bool:
    """Decode a block's worth of tokens; False if the request has ended, and its blocks are free."""
    if request.num_tokens < end_tokens:
        request.append_output_token_ids([TOKEN] * BLOCK_TOKENS)
        if manager.allocate_slots(request, BLOCK_TOKENS):
            request.num_computed_tokens = request.num_tokens
            return True
    manager.free(request)
    return False


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    rows = []
    for traffic in TRAFFIC:
        found = np.array(grow_old(traffic, arguments.requests))
        for first, last in WINDOWS:
            some = found[int(first * len(found)) : int(last * len(found))]
            shares = [float(np.average(some[:, i], weights=some[:, 2])) for i in (0, 1)]
            rows.append(
                {
                    "gpu_blocks": traffic.gpu_blocks,
                    "running": traffic.running,
                    "prompt_tokens": traffic.prompt_tokens,
                    "answer_tokens": traffic.answer_tokens,
                    "requests": [int(first * len(found)), int(last * len(found))],
                    "in runs": round(shares[0], 3),
                    "in runs, in order": round(shares[1], 3),
                }
            )
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    if arguments.out:
        document = {"machine": machine() | {"vllm": vllm_module().__version__}, "rows": rows}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
