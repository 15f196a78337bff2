"""Time to first token and throughput of a real engine: without offloading, with peers, with us.

usage: python -m bench.bench_serving [--shape small|gqa8|mqa] [--connectors off,vllm,kv-offload]
                                     [--out FOLDER]

Every connector gets an engine in a process of its own: the same shape with random weights, the same
prompts, the same GPU cache. A prompt is computed once; then the GPU-side prefix cache is reset and
the prompt is sent again, so that only the connector's memory can serve it. Random weights cannot
tell right KV from wrong, so for this project the bytes that were loaded are checked against the
bytes that had to be; that they are the right bytes is what the tests show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONNECTORS = ("off", "vllm", "kv-offload")
REPEATS = 5


@dataclass(frozen=True)
class Shape:
    """A model's shape and the load that is put on it."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    gpu_blocks: int
    block_tokens: int
    cpu_gib: float
    prompt_tokens: tuple[int, ...]
    throughput_prompts: int
    throughput_tokens: int

    def kv_bytes(self, tokens: int, item_bytes: int) -> int:
        """Return the bytes of the full blocks of a prompt that can be served from a cache."""
        blocks = (tokens - 1) // self.block_tokens
        per_token = 2 * self.layers * self.kv_heads * self.head_size * item_bytes
        return blocks * self.block_tokens * per_token


SHAPES = {
    "small": Shape(2, 4, 2, 32, 128, 256, 600, 32, 0.25, (256, 1024), 4, 512),
    "gqa8": Shape(32, 32, 8, 128, 4096, 14336, 6000, 16, 24, (1024, 4096, 16384, 32768), 16, 8192),
    "mqa": Shape(32, 32, 1, 128, 4096, 14336, 6000, 16, 8, (1024, 4096, 16384, 32768), 32, 8192),
}


def measure(shape_name: str, connector: str, totals: Counter[str]) -> dict[str, Any]:
    """Start one engine in this process and measure it; `totals` counts what the plugin moves."""
    import torch
    from transformers import LlamaConfig
    from vllm import LLM, SamplingParams

    shape = SHAPES[shape_name]
    on_gpu = torch.cuda.is_available()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        vocab_size=32000,
        max_position_embeddings=65536,
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16" if on_gpu else "float32",
            block_size=shape.block_tokens,
            num_gpu_blocks_override=shape.gpu_blocks,
            kv_cache_memory_bytes=None if on_gpu else 64 << 20,
            max_model_len=max(*shape.prompt_tokens, shape.throughput_tokens) + 16,
            enforce_eager=not on_gpu,
            **_connector_arguments(connector, shape),
        )
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    tokens = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
        return [
            {"prompt_token_ids": [int(t) for t in tokens.integers(10, 31000, length)]}
            for _ in range(count)
        ]

    def seconds(batch: list[dict[str, list[int]]]) -> float:
        begin = time.perf_counter()
        llm.generate(batch, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        return time.perf_counter() - begin

    def loaded_bytes() -> float:
        return totals["loaded_bytes"]

    def reset() -> None:
        deadline = time.monotonic() + 30
        while not llm.reset_prefix_cache():  # vLLM's own connectors need a few steps first
            seconds(prompts(1, 2 * shape.block_tokens))
            assert time.monotonic() < deadline, "the prefix cache cannot be reset"

    seconds(prompts(2, shape.prompt_tokens[0]))
    for length in shape.prompt_tokens:
        first, again = [], []
        for _ in range(REPEATS):
            batch = prompts(1, length)
            first.append(seconds(batch))
            reset()
            before = loaded_bytes()
            again.append(seconds(batch))
            if connector == "kv-offload":
                expected, loaded = shape.kv_bytes(length, 2 if on_gpu else 4), loaded_bytes()
                assert loaded - before == expected, (
                    f"{loaded - before:.0f} of {expected} bytes of a prompt of {length} tokens "
                    f"were loaded; {dict(totals)}"
                )
            reset()
        result[f"computed_{length}"] = _spread(first)
        result[f"repeated_{length}"] = _spread(again)
    batch = prompts(shape.throughput_prompts, shape.throughput_tokens)
    total = shape.throughput_prompts * shape.throughput_tokens
    result["computed_tokens_per_second"] = total / seconds(batch)
    reset()
    before = loaded_bytes()
    result["repeated_tokens_per_second"] = total / seconds(batch)
    result["repeated_loaded_bytes"] = loaded_bytes() - before
    llm.llm_engine.engine_core.shutdown()
    return result


def _connector_arguments(connector: str, shape: Shape) -> dict[str, Any]:
    cpu_bytes = int(shape.cpu_gib * (1 << 30))
    if connector == "off":
        return {}
    if connector == "vllm":
        extra = {"cpu_bytes_to_use": cpu_bytes}
        return {
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        }
    return {
        "kv_transfer_config": {
            "kv_connector": "KVOffloadConnector",
            "kv_connector_module_path": "kv_offload.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes": cpu_bytes},
        }
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    import torch
    import vllm

    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts["vllm"] = vllm.__version__
    facts["device"] = f"{os.cpu_count()} CPU cores"
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return facts


def table(shape: Shape, results: dict[str, dict[str, Any]]) -> str:
    """Return the results as Markdown, times in milliseconds."""
    columns = list(results)
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for length in shape.prompt_tokens:
        cells = [f"{1000 * results[c][f'repeated_{length}']['median']:.1f}" for c in columns]
        lines.append(f"| repeated prompt of {length} tokens, ms | " + " | ".join(cells) + " |")
    for key, label in (("computed", "0 % hits"), ("repeated", "100 % hits")):
        cells = [f"{results[c][f'{key}_tokens_per_second']:,.0f}" for c in columns]
        load = f"{shape.throughput_prompts} prompts of {shape.throughput_tokens}"
        lines.append(f"| {load}, {label}, tokens/s | " + " | ".join(cells) + " |")
    cells = [f"{results[c]['start_seconds']:.1f}" for c in columns]
    lines.append("| engine start, s | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run every connector in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--connectors", default="off,kv-offload")
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        from bench.totals import counted_stats

        with counted_stats() as totals:
            result = measure(arguments.shape, arguments.child, totals)
        print("RESULT " + json.dumps(result), flush=True)
        return
    results = {}
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        **os.environ,
    }
    for connector in arguments.connectors.split(","):
        print(f"{connector}: starting an engine ...", flush=True)
        command = [sys.executable, "-m", "bench.bench_serving", "--shape", arguments.shape]
        child = subprocess.run(
            [*command, "--child", connector], env=environment, stdout=subprocess.PIPE, text=True
        )
        lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"{connector}: no result, exit status {child.returncode}")
        results[connector] = json.loads(lines[0].removeprefix("RESULT "))
        print(f"{connector}: done", flush=True)
    shape = SHAPES[arguments.shape]
    print(table(shape, results))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine(), "shape": asdict(shape), "results": results}
        path = arguments.out / f"serving-{arguments.shape}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
