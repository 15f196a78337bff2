"""Measures the gain of two replicas from a shared store: time to first token by place.

usage: python -m bench.tiers.replicas [--shape small|gqa8|mqa] [--remote-bytes BYTES] [--out FOLDER]

One replica gets new prompts, and the same ones again once its GPU cache is empty. Then the other
replica gets them. Without a store, it computes them. With a store, to which both have given BYTES
of memory, it loads the KV that the first has computed. Each replica has a GPU if the host has any.

Results are written to replicas-SHAPE.json. The exit status is 1 if a prompt was not read completely
from the store.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import write_result
from bench.serving.process import progress
from bench.serving.report import markdown_table, shown_spread
from bench.serving.settings import OURS, EngineSettings
from bench.serving.shapes import SHAPES, Shape
from bench.serving.stats import spread
from bench.tiers.__main__ import ALWAYS, RATE, Document, conclude, new_document, with_mooncake

REPLICAS = 2
REPEATS = 3
"""Number of prompts of each length."""
WRITTEN_SECONDS = 60
OWN, SHARED = "own memory", "shared store"
PLACES = ("computed", "own host memory", "asked of the other replica")


async def measure(shape: Shape, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start both replicas, send prompts, and return time to first token by length and place."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from bench.serving.engine import engine_arguments, model_config
    from tests.support.totals import totals_by_replica

    settings = EngineSettings(shape, OURS, model, options)
    model_config(shape).save_pretrained(model)
    on_gpu = torch.cuda.is_available()
    item_bytes = 2 if on_gpu else 4
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **engine_arguments(settings, on_gpu=on_gpu),
            enforce_eager=True,  # computing prompts and loading hits needs no CUDA graphs
            data_parallel_size=REPLICAS,
            kv_transfer_config=KVTransferConfig(**(settings.transfer_config or {})),
        )
    )
    asked = 0

    async def ask(replica: int, tokens: list[int]) -> float:
        nonlocal asked
        asked += 1
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        request = llm.generate(
            {"prompt_token_ids": tokens}, sampling, f"r{asked}", data_parallel_rank=replica
        )
        async for _ in request:
            pass
        return time.perf_counter() - began

    async def forget() -> None:
        """Empty the GPU caches, so that only host memory and the store have the prompts."""
        assert await llm.reset_prefix_cache() is not False

    def moved(name: str, replica: int) -> int:
        return totals_by_replica(name, REPLICAS)[replica]

    async def settle() -> None:
        """Run steps, so that reports arrive."""
        for replica in range(REPLICAS):
            await ask(replica, [3, 4, 5])

    results: dict[str, Any] = {}
    random = np.random.default_rng(shape.hidden)
    try:
        for replica in range(REPLICAS):  # compile and load everything before measuring
            for length in shape.prompt_tokens:
                await ask(replica, random.integers(10, 31000, length).tolist())
        for length in shape.prompt_tokens:
            took: dict[str, list[float]] = {place: [] for place in PLACES}
            least = shape.loadable_bytes(length, item_bytes)[0] // shape.block_bytes(item_bytes)
            read = 0
            for _ in range(REPEATS):
                prompt = random.integers(10, 31000, length).tolist()
                written, had = moved("demoted_slots", 0), moved("promoted_slots", 1)
                took[PLACES[0]].append(await ask(0, prompt))
                await forget()
                took[PLACES[1]].append(await ask(0, prompt))
                until = time.monotonic() + WRITTEN_SECONDS
                while "remote" in options and moved("demoted_slots", 0) < written + least:
                    assert time.monotonic() < until, "the store does not take the prompt"
                    await settle()
                took[PLACES[2]].append(await ask(1, prompt))
                await settle()
                read += moved("promoted_slots", 1) - had
                await forget()
            results[str(length)] = {
                **{place: spread(times) for place, times in took.items()},
                "blocks_read": read,
                "blocks_needed": REPEATS * least if "remote" in options else 0,
            }
    finally:
        llm.shutdown()
    return results


def unproven(document: Document) -> list[str]:
    """Name the prompts that were not read completely from the store."""
    return [
        f"NOT PROVEN: {name}, {tokens} tokens: {found['blocks_read']} of "
        f"{found['blocks_needed']} blocks were read"
        for name, result in document["results"].items()
        for tokens, found in result.items()
        if found["blocks_read"] < found["blocks_needed"]
    ]


def table(document: Document) -> str:
    """Return the times as Markdown."""
    rows = [
        [name, f"{int(tokens):,}", *(shown_spread(found[place], 1e3, 1) for place in PLACES)]
        for name, result in document["results"].items()
        for tokens, found in result.items()
    ]
    question = "How long until the first token, with two replicas? ms, median (range)"
    return markdown_table(question, ["replicas with", "tokens", *PLACES], rows)


def main(words: list[str] | None = None) -> int:
    """Measure, print the table, and return the exit status."""
    from kv_offload.engines.vllm.plugin import register

    register()  # as vLLM does if the package is installed
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--remote-bytes", default="1GiB", help="that each replica gives")
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args(words)
    shape = SHAPES[arguments.shape]
    document = new_document(arguments.shape)
    with tempfile.TemporaryDirectory() as model, with_mooncake() as master:
        remote = {"kind": "mooncake", "address": master, "write_rate": RATE}
        store = {"remote": {**remote, "bytes": arguments.remote_bytes}}
        for name, options in ((OWN, ALWAYS), (SHARED, {**ALWAYS, **store})):
            progress(f"{name}: starting two replicas")
            document["results"][name] = asyncio.run(measure(shape, model, options))
            if arguments.out:
                write_result(arguments.out / f"replicas-{arguments.shape}.json", document)
    return conclude(table(document), unproven(document))


if __name__ == "__main__":
    sys.exit(main())
