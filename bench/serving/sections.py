"""What the serving bench measures on one engine. Seconds everywhere, bytes where the name says so.

A prompt is computed once; then the GPU's prefix cache is emptied and the prompt is sent again, so
that only the connector's memory can serve it. Random weights cannot tell right KV from wrong: for
this project the bytes that were loaded are compared with those that had to be; that they are the
right bytes is what the tests show. Of the peers no such proof is asked.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench.serving.engine import Prompt, ServingEngine, memory_in_use
from bench.serving.stats import percentiles, spread

Result = dict[str, Any]
PHASES = ("alone", "storing", "loading")
SETTLE_STEPS = 32
"""Steps of decodes that are not watched: what their own prompts store is under way."""


def loads_since(
    engine: ServingEngine, before: float, bytes_of_one: tuple[int, int], prompts: int = 1
) -> Result:
    """Return how many bytes were loaded since `before` of them were; None of a peer.

    With it come the least and the most bytes that so many prompts need.
    """
    engine.tick()  # a load that the last step waited for is reported by the next one
    loaded = int(engine.counted["loaded_bytes"] - before)
    return {
        "least_bytes": bytes_of_one[0] * prompts,
        "most_bytes": bytes_of_one[1] * prompts,
        "loaded_bytes": loaded if engine.settings.is_ours else None,
    }


def send_again(
    engine: ServingEngine, batch: list[Prompt], loadable_tokens: int, answer_tokens: int = 1
) -> tuple[float, Result]:
    """Send prompts that the GPU's cache has not; return the seconds that took and the loads.

    Host memory should have the first `loadable_tokens` of each.
    """
    engine.reset()
    before = engine.counted["loaded_bytes"]
    seconds = engine.seconds(batch, answer_tokens)
    loadable = engine.shape.loadable_bytes(loadable_tokens, engine.item_bytes)
    return seconds, loads_since(engine, before, loadable, len(batch))


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
        loaded: list[Result] = []
        for seed in range(10, 10 + shape.repeats):
            batch = engine.prompts(seed, 1, length)
            first.append(engine.seconds(batch, engine.first_tokens))
            if engine.settings.offloading is None:
                again.append(engine.seconds(batch))
                continue
            seconds, load = send_again(engine, batch, length)
            again.append(seconds)
            loaded.append(load)
            engine.reset()
        result: Result = {"computed": spread(first), "repeated": spread(again), "loads": loaded}
        if engine.settings.offloading is None:
            result |= {"repeated": spread(first), "in GPU cache": spread(again)}
            engine.reset()
        results[str(length)] = result
    return results


def throughput(engine: ServingEngine) -> Result:
    """Tokens per second of many prompts at once, of which a share of each is in host memory."""
    shape = engine.shape
    length, half = shape.batch_tokens, shape.batch_tokens // 2
    total = shape.batch_prompts * length
    batch = engine.prompts(20, shape.batch_prompts, length)
    mixed: list[Prompt] = [
        {"prompt_token_ids": old["prompt_token_ids"][:half] + new["prompt_token_ids"][half:]}
        for old, new in zip(batch, engine.prompts(21, shape.batch_prompts, length), strict=True)
    ]
    engine.reset()
    rate = total / engine.seconds(batch, engine.first_tokens)
    results: Result = {"0": {"tokens_per_second": spread([rate])}}
    if engine.settings.offloading is None:
        return results
    # Under pressure stores are dropped rather than awaited, so the first time again shows how much
    # of the batch was kept; it is computed and stored then.
    seconds, kept = send_again(engine, batch, length, engine.first_tokens)
    results["first time again"] = {"tokens_per_second": spread([total / seconds]), "kept": kept}
    for hits, prompts, tokens, repeats in ((100, batch, length, 3), (50, mixed, half + 1, 1)):
        sent = [send_again(engine, prompts, tokens) for _ in range(repeats)]
        rates = spread([total / seconds for seconds, _ in sent])
        results[str(hits)] = {"tokens_per_second": rates, "loads": [load for _, load in sent]}
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
        before = engine.counted["loaded_bytes"]
        results[phase] = watch(engine, decodes, [] if phase == "alone" else others)
        if engine.settings.offloading is not None:
            prompts = len(others) if phase == "loading" else 0
            results[phase]["loads"] = [loads_since(engine, before, expected, prompts)]
    engine.reset()
    return results


def watch(engine: ServingEngine, decodes: list[Prompt], others: list[Prompt]) -> Result:
    """Run decodes, and watch them until the others, which come one by one, have had an answer.

    Without others for `decode_steps` steps.
    """
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
