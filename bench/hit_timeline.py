"""Where the time to first token of a repeated prompt goes, span by span, on a real engine.

usage: python -m bench.hit_timeline [--shape small|gqa8|mqa] [--connector kv-offload|vllm|...]
                                    [--options JSON] [--out FILE.json]

A prompt is computed, the GPU's prefix cache is emptied, and the prompt is sent again. From then on
the host's calls are timed by wrapping them, the device's work by the kernels that torch's profiler
saw. A span is a name, its start after the call of `LLM.generate`, and its length, both in ms and
medians over the prompts; spans of one name are numbered, and may lie within others.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.serving_engine import Prompt, ServingEngine
from bench.serving_report import table
from bench.serving_shapes import CONNECTORS, SHAPES
from bench.swap_rows import machine, vllm_module
from kv_offload.engines.vllm.halves import halves

Span = tuple[str, float, float]
"""Name, start and end; unix seconds."""

COPY_KERNEL = "swap_load"


class Spans:
    """Collects spans of wrapped methods while it is on."""

    def __init__(self) -> None:
        self.found: list[Span] = []

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method of one object from now on; nothing if it has none."""
        original = getattr(owner, method, None)
        if original is not None:
            setattr(owner, method, self._timed(name, original))

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.time()
            try:
                return original(*arguments, **named)
            finally:
                self.found.append((name, started, time.time()))

        return timed


def put_on(spans: Spans, engine: ServingEngine) -> None:
    """Wrap what a step of the engine calls, on the scheduler's and on the worker's side."""
    core = engine.llm.llm_engine.engine_core.engine_core
    spans.wrap(core, "preprocess_add_request", "request is built")
    spans.wrap(core.scheduler, "schedule", "schedule")
    spans.wrap(core.scheduler, "update_from_output", "update")
    connector = core.scheduler.connector
    if connector is not None:
        spans.wrap(connector, "get_num_new_matched_tokens", "connector: match")
        spans.wrap(connector, "update_state_after_alloc", "connector: plan the load")
        spans.wrap(connector, "build_connector_meta", "connector: plan the step")
    worker = core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    spans.wrap(core.model_executor, "execute_model", "execute")
    spans.wrap(core.model_executor, "sample_tokens", "sample")
    for method in (  # of runner V1, then of V2
        *("_update_states", "_prepare_inputs", "_build_attention_metadata"),
        *("add_requests", "prepare_inputs", "prepare_attn"),
    ):
        spans.wrap(runner, method, f"runner: {method.strip('_').replace('_', ' ')}")
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        spans.wrap(connector, "start_load_kv", "connector: start_load_kv")
        for half in halves(connector, "offload_worker"):
            spans.wrap(half, "start_copies", "connector: submit")


@contextmanager
def device_spans(found: list[Span], on_gpu: bool) -> Iterator[None]:
    """Add the device's work within the block: the copies of our loads, and all other kernels."""
    if not on_gpu:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    copies, others = [], []
    for event in profiler.profiler.kineto_results.events():
        if "CUDA" not in str(event.device_type()) or event.duration_ns() == 0:
            continue
        times = event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9
        (copies if COPY_KERNEL in event.name() else others).append(times)
    for copy in sorted(copies):
        found.append(("device: a launch of the load", *copy))
    if others:
        found.append(("device: everything else", min(others)[0], max(end for _, end in others)))
    loaded = max((end for _, end in copies), default=float("inf"))
    late = [times for times in others if times[1] > loaded]
    if late:
        found.append(("device: work after the load", min(late)[0], max(end for _, end in late)))


def one_hit(engine: ServingEngine, spans: Spans, prompt: list[Prompt]) -> list[Span]:
    """Compute a prompt, forget it on the GPU, send it again; return the spans of the second time.

    Starts are seconds since then.
    """
    engine.seconds(prompt)
    engine.tick()
    engine.reset()
    engine.settle()
    device: list[Span] = []
    with device_spans(device, engine.on_gpu):
        spans.found.clear()
        began = time.time()
        engine.seconds(prompt)
        host = [("LLM.generate", began, time.time()), *spans.found]
    seen: Counter[str] = Counter()
    numbered = []
    for name, start, end in sorted(host + device, key=lambda span: span[1]):
        seen[name] += 1
        numbered.append((f"{name} {seen[name]}", start - began, end - began))
    return numbered


def medians(runs: Sequence[list[Span]]) -> list[dict[str, Any]]:
    """Return the spans that all runs have, as rows with medians in milliseconds."""
    by_name = [{name: (start, end) for name, start, end in run} for run in runs]
    names = [name for name, *_ in runs[0] if all(name in run for run in by_name)]
    rows = []
    for name in names:
        starts = [1e3 * run[name][0] for run in by_name]
        lengths = [1e3 * (run[name][1] - run[name][0]) for run in by_name]
        rows.append(
            {
                "span": name,
                "start": statistics.median(starts),
                "length": statistics.median(lengths),
                "lengths": [round(length, 3) for length in lengths],
            }
        )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--connector", choices=CONNECTORS, default="kv-offload")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    shape = SHAPES[arguments.shape]
    engine = ServingEngine(shape, arguments.connector, arguments.options, separate_core=False)
    spans = Spans()
    put_on(spans, engine)
    results = {}
    for length in shape.prompt_tokens:
        prompts = [engine.prompts(seed, 1, length) for seed in range(50, 51 + shape.repeats)]
        runs = [one_hit(engine, spans, prompt) for prompt in prompts][1:]
        rows = medians(runs)
        results[str(length)] = rows
        print(f"\n{length} tokens\n")
        cells = [[r["span"], f"{r['start']:.2f}", f"{r['length']:.2f}"] for r in rows]
        print(table(["span", "start, ms", "length, ms"], cells), flush=True)
    if arguments.out:
        document = {
            "machine": machine() | {"vllm": vllm_module().__version__},
            "shape": arguments.shape,
            "connector": arguments.connector,
            "options": arguments.options,
            "spans": results,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
