"""Time to first token of a repeated prompt, with and without its last slot loaded, by turns.

usage: python -m bench.whole_hits [--shape small|gqa8|mqa] [--out FILE.json]

Prompts that end with a slot can be loaded whole: then the step computes one token, after the load.
Without the last slot it computes that slot's tokens, and begins while later layers still arrive.
Which is sooner depends on the load and on the model; `kv_offload/load_mode.py` decides. Both are
measured on one engine, beside a hit in the GPU's own cache. Milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from bench.serving_engine import Prompt, ServingEngine
from bench.serving_report import table
from bench.serving_sections import expect_loads
from bench.serving_shapes import SHAPES
from bench.serving_stats import spread
from bench.swap_rows import machine, vllm_module
from kv_offload.scheduler.loads import LoadMode

WAYS = ("whole", "without the last slot", "in GPU cache")
ROUNDS = 7


def one_round(engine: ServingEngine, prompt: list[Prompt], whole_first: bool) -> dict[str, float]:
    """Compute a new prompt, then take its time in every way; seconds."""
    engine.seconds(prompt)
    length = len(prompt[0]["prompt_token_ids"])
    loadable = engine.shape.loadable_bytes(length, engine.item_bytes)
    times = {WAYS[2]: engine.seconds(prompt)}
    for whole in (whole_first, not whole_first):
        engine.reset()
        count = expect_loads(engine, loadable)
        with mock.patch.object(LoadMode, "brings_last_slot", lambda *_, whole=whole, **__: whole):
            times[WAYS[not whole]] = engine.seconds(prompt)
        proof = count()
        if proof["loaded_bytes"] != proof["most_bytes" if whole else "least_bytes"]:
            raise SystemExit(f"NOT PROVEN, {length} tokens, {whole=}: {proof}")
    engine.reset()
    return times


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    shape = SHAPES[arguments.shape]
    engine = ServingEngine(shape, "kv-offload", {}, separate_core=False)
    engine.seconds(engine.prompts(1, 2, shape.prompt_tokens[0]), 32)
    shortest, longest = shape.prompt_tokens[0] // 2, shape.prompt_tokens[-1]
    lengths = [shortest << power for power in range((longest // shortest).bit_length())]
    results = {}
    for length in lengths:
        prompts = [engine.prompts(700 + index, 1, length) for index in range(ROUNDS)]
        rounds = [one_round(engine, prompt, bool(i % 2)) for i, prompt in enumerate(prompts)]
        results[str(length)] = {way: spread([1e3 * times[way] for times in rounds]) for way in WAYS}
    rows = [
        [length, *(f"{t['median']:.2f} ({t['min']:.2f} to {t['max']:.2f})" for t in found.values())]
        for length, found in results.items()
    ]
    print(table(["repeated prompt, tokens", *WAYS], rows))
    if arguments.out:
        document = {
            "machine": machine() | {"vllm": vllm_module().__version__},
            "shape": arguments.shape,
            "milliseconds": results,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
