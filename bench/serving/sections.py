"""What the serving bench measures on one engine. Seconds everywhere, bytes where the name says so.

A prompt is computed once; then the GPU's prefix cache is emptied and the prompt is sent again, so
that only the connector's memory can serve it. Random weights cannot tell right KV from wrong: for
this project the bytes that were loaded are compared with those that had to be; that they are the
right bytes is what the tests show. Of the peers no such proof is asked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.serving.engine import Prompt, ServingEngine, memory_in_use
from bench.serving.stats import percentiles, spread

Result = dict[str, Any]
HITS = (0, 50, 100)
PHASES = ("alone", "storing", "loading")
SETTLE_STEPS = 32
"""Steps of decodes that are not watched: what their own prompts store is under way."""


def expect_loads(
    engine: ServingEngine, bytes_of_one: tuple[int, int], prompts: int = 1
) -> Callable[[], Result]:
    """Return a function that says how many bytes were loaded since; None of a peer.

    With it come the least and the most bytes that so many prompts need.
    """
    before = engine.counted["loaded_bytes"]

    def count() -> Result:
        engine.tick()  # a load that the last step waited for is reported by the next one
        loaded = int(engine.counted["loaded_bytes"] - before)
        return {
            "least_bytes": bytes_of_one[0] * prompts,
            "most_bytes": bytes_of_one[1] * prompts,
            "loaded_bytes": loaded if engine.settings.is_ours else None,
        }

    return count


def ttft(engine: ServingEngine) -> Result:
    """Time to first token of a prompt that is computed, and of the same prompt once it is stored.

    Without a connector the second time is the first: there is nothing to serve it from. Instead the
    prompt is repeated without a reset, which is what a hit in the GPU's own cache takes.
    """
    shape, results = engine.shape, {}
    # As a server has, it computes some prompts and decodes before it is looked at.
    engine.seconds(engine.prompts(1, 2, shape.prompt_tokens[0]), 32)
    for length in shape.prompt_tokens:
        first: list[float] = []
        again: list[float] = []
        on_gpu: list[float] = []
        batches = [engine.prompts(seed, 1, length) for seed in range(10, 10 + shape.repeats)]
        loaded = []
        for batch in batches:
            first.append(engine.seconds(batch, engine.first_tokens))
            if engine.settings.offloading is None:
                on_gpu.append(engine.seconds(batch))
                continue
            engine.reset()
            count = expect_loads(engine, shape.loadable_bytes(length, engine.item_bytes))
            again.append(engine.seconds(batch))
            loaded.append(count())
            engine.reset()
        results[str(length)] = {
            "computed": spread(first),
            "repeated": spread(again or first),
            "loads": loaded,
        }
        if on_gpu:
            results[str(length)]["in GPU cache"] = spread(on_gpu)
        if engine.settings.offloading is None:
            engine.reset()
    return results


def throughput(engine: ServingEngine) -> Result:
    """Tokens per second of many prompts at once, of which a share of each is in host memory."""
    shape = engine.shape
    total = shape.batch_prompts * shape.batch_tokens
    batch = engine.prompts(20, shape.batch_prompts, shape.batch_tokens)
    half = shape.batch_tokens // 2
    mixed: list[Prompt] = [
        {"prompt_token_ids": old["prompt_token_ids"][:half] + new["prompt_token_ids"][half:]}
        for old, new in zip(
            batch, engine.prompts(21, shape.batch_prompts, shape.batch_tokens), strict=True
        )
    ]
    engine.reset()
    rate = total / engine.seconds(batch, engine.first_tokens)
    results: Result = {"0": {"tokens_per_second": spread([rate])}}
    if engine.settings.offloading is None:
        return results
    loadable = {
        100: shape.loadable_bytes(shape.batch_tokens, engine.item_bytes),
        50: shape.loadable_bytes(half + 1, engine.item_bytes),
    }
    # Under pressure stores are dropped rather than awaited, so the first time again shows how much
    # of the batch was kept; it is computed and stored then.
    engine.reset()
    count = expect_loads(engine, loadable[100], shape.batch_prompts)
    rate = total / engine.seconds(batch, engine.first_tokens)
    results["first time again"] = {"tokens_per_second": spread([rate]), "kept": count()}
    for hits, prompts, repeats in ((100, batch, 3), (50, mixed, 1)):
        times: list[float] = []
        loaded = []
        for _ in range(repeats):
            engine.reset()
            count = expect_loads(engine, loadable[hits], shape.batch_prompts)
            times.append(engine.seconds(prompts))
            loaded.append(count())
        rates = spread([total / seconds for seconds in times])
        results[str(hits)] = {"tokens_per_second": rates, "loads": loaded}
    return results


def latency(engine: ServingEngine) -> Result:
    """Inter-token latency of running decodes: alone, beside prompts computed, beside ones loaded.

    The prompts of the last two phases are the same; without a connector they are computed twice.
    With each phase comes the host time in the connector's hooks, a step.
    """
    shape = engine.shape
    others = engine.prompts(30, shape.other_prompts, shape.other_tokens)
    results: Result = {}
    expected = shape.loadable_bytes(shape.other_tokens, engine.item_bytes)
    for index, phase in enumerate(PHASES):
        engine.reset()
        decodes = engine.prompts(31 + index, shape.decodes, shape.decode_prompt_tokens)
        count = expect_loads(engine, expected, len(others) if phase == "loading" else 0)
        results[phase] = _watch(engine, decodes, [] if phase == "alone" else others)
        if engine.settings.offloading is not None:
            results[phase]["loads"] = [count()]
    engine.reset()
    return results


def _watch(engine: ServingEngine, decodes: list[Prompt], others: list[Prompt]) -> Result:
    shape = engine.shape
    limit = shape.max_model_len - shape.decode_prompt_tokens
    last = dict.fromkeys((f"decode-{index}" for index in range(len(decodes))), 0.0)
    for request_id, prompt in zip(last, decodes, strict=True):
        engine.add(request_id, prompt, limit)
    started: set[str] = set()
    settled = 0
    while settled < SETTLE_STEPS:
        started.update(engine.step())
        settled += started >= last.keys()
    now = time.perf_counter()
    last = dict.fromkeys(last, now)
    engine.clock.take()
    between: list[float] = []
    host: list[float] = []
    waiting = [(f"other-{index}", prompt) for index, prompt in enumerate(others)]
    waiting.reverse()
    running: set[str] = set()
    steps = 0
    while waiting or running or steps < (0 if others else shape.decode_steps):
        if waiting and steps % shape.steps_between == 0:
            request_id, prompt = waiting.pop()
            running.add(request_id)
            engine.add(request_id, prompt, engine.first_tokens)
        done = engine.step()
        now = time.perf_counter()
        for request_id in done:
            if request_id in last:
                between.append(now - last[request_id])
                last[request_id] = now
        running.difference_update(done)
        host.append(engine.clock.take().total())
        steps += 1
    engine.abort(list(last))
    result = {"between_tokens": percentiles(between), "steps": steps}
    if engine.settings.offloading is not None:
        result["connector_per_step"] = {"mean": statistics.mean(host), **percentiles(host)}
    return result


def turn(engine: ServingEngine, seed: int) -> float:
    """Compute new prompts once; return tokens per second. Nothing runs on afterwards."""
    shape = engine.shape
    batch = engine.prompts(1000 + seed, shape.pair_prompts, shape.batch_tokens)
    seconds = engine.seconds(batch)
    engine.settle()
    return shape.pair_prompts * shape.batch_tokens / seconds


def link(engine: ServingEngine) -> Result:
    """Measure what bounds a load from below: the host-to-device link, and a step of one decode.

    Without a GPU there is no link, and the figure is None.
    """
    engine.add("single", engine.prompts(40, 1, engine.shape.decode_prompt_tokens)[0], 80)
    times: list[float] = []
    while len(times) < 64:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    engine.abort(["single"])
    bytes_per_second = None
    if engine.on_gpu:
        host = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        copies = []
        for _ in range(12):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            device.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            copies.append(len(host) / (time.perf_counter() - begin))
        bytes_per_second = statistics.median(copies)
    return {"bytes_per_second": bytes_per_second, "decode_step": statistics.median(times)}


def memory(engine: ServingEngine) -> Result:
    """Return what the process holds and the machine has left, before the start and now."""
    return {"before": engine.memory_before, "now": memory_in_use(), "pool_bytes": engine.pool_bytes}
