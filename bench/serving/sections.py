"""Measurements of the serving benchmark on one engine, in seconds unless named otherwise.

A prompt is computed once; then the GPU's prefix cache is emptied and the prompt is sent again, so
that only the connector's memory can serve it. With random weights, wrong KV would go unnoticed. So
for this project, the number of loaded bytes is compared with the expected one; the tests show that
they are the right bytes. In every column, vLLM counts the tokens that were not computed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench.serving.engine import Prompt, ServingEngine
from bench.serving.stats import percentiles

Result = dict[str, Any]
PHASES = ("alone", "storing", "loading")
PASSES = 3
"""How often the section `throughput` repeats its batch."""
SETTLE_STEPS = 32
"""Unmeasured steps of decodes, during which their own prompts are stored."""


def loads_since(
    engine: ServingEngine, before: float, bytes_of_one: tuple[int, int], prompts: int = 1
) -> Result:
    """Return the bytes loaded since the counter was at `before`; None for other connectors.

    Also returns the minimum and maximum bytes that the prompts need.
    """
    engine.tick()  # the next step reports a load that the last step waited for
    loaded = int(engine.counted["loaded_bytes"] - before)
    return {
        "least_bytes": bytes_of_one[0] * prompts,
        "most_bytes": bytes_of_one[1] * prompts,
        "loaded_bytes": loaded if engine.settings.is_ours else None,
    }


def send_again(engine: ServingEngine, batch: list[Prompt]) -> Result:
    """Send prompts that are not in the GPU cache.

    Returns the seconds, the tokens that vLLM did not compute, and the loads: the bytes of those
    tokens, up to a block per prompt, since at least one token of a prompt is always computed.
    """
    engine.reset()
    before = engine.counted["loaded_bytes"]
    seconds, cached = engine.serve(batch)
    nbytes = cached * engine.shape.token_bytes(engine.item_bytes)
    slack = len(batch) * engine.shape.block_bytes(engine.item_bytes)
    loads = loads_since(engine, before, (nbytes - slack, nbytes + slack))
    return {"seconds": seconds, "cached_tokens": cached, "loads": loads}


def warm_up(engine: ServingEngine) -> None:
    """Compute some prompts and decode, so that the engine is as warm as a running server."""
    engine.seconds(engine.prompts(1, 2, engine.shape.prompt_tokens[0]), 32)


def ttft(engine: ServingEngine) -> Result:
    """Measure time to first token of computed prompts, and of the same prompts once stored.

    In the column `off`, a prompt is repeated without a reset, so the GPU cache serves it.
    """
    shape, results = engine.shape, {}
    warm_up(engine)
    for length in shape.prompt_tokens:
        computed: list[float] = []
        repeated: list[float] = []
        loads: list[Result] = []
        for seed in range(10, 10 + shape.repeats):
            batch = engine.prompts(seed, 1, length)
            computed.append(engine.seconds(batch))
            if engine.keeps_prompts:
                engine.reset()
            before = engine.counted["loaded_bytes"]
            repeated.append(engine.seconds(batch))
            if engine.keeps_prompts:
                loadable = shape.loadable_bytes(length, engine.item_bytes)
                loads.append(loads_since(engine, before, loadable))
                engine.reset()
        engine.reset()
        name = "repeated" if engine.keeps_prompts else "in GPU cache"
        results[str(length)] = {"computed": computed, name: repeated, "loads": loads}
    return results


def throughput(engine: ServingEngine) -> Result:
    """Measure the seconds for many prompts at once, after others that were sent twice.

    First all prompts are new, then host memory has all of each prompt, then the first half of each.
    """
    shape = engine.shape
    length, half = shape.batch_tokens, shape.batch_tokens // 2
    warm_up(engine)
    old = engine.prompts(22, shape.old_prompts, length)
    for _ in range(2):
        engine.reset()
        engine.seconds(old)
    batch = engine.prompts(20, shape.batch_prompts, length)
    mixed: list[Prompt] = [
        {"prompt_token_ids": one["prompt_token_ids"][:half] + new["prompt_token_ids"][half:]}
        for one, new in zip(batch, engine.prompts(21, shape.batch_prompts, length), strict=True)
    ]
    engine.reset()
    results: Result = {"0": [{"seconds": engine.seconds(batch)}]}
    if engine.keeps_prompts:
        results["100"] = [send_again(engine, batch) for _ in range(PASSES)]
        results["50"] = [send_again(engine, mixed)]
    engine.reset()
    return results


def decodes(engine: ServingEngine) -> Result:
    """Measure inter-token latency of decodes: alone, next to computed and next to loaded prompts.

    The last two phases have the same prompts; without a connector, these are computed twice. Each
    phase also has the host time per step in the connector's hooks.
    """
    shape = engine.shape
    warm_up(engine)
    others = engine.prompts(30, shape.other_prompts, shape.other_tokens)
    results: Result = {}
    expected = shape.loadable_bytes(shape.other_tokens, engine.item_bytes)
    for index, phase in enumerate(PHASES):
        engine.reset()
        running = engine.prompts(31 + index, shape.decodes, shape.decode_prompt_tokens)
        before = engine.counted["loaded_bytes"]
        results[phase] = watch(engine, running, [] if phase == "alone" else others)
        if engine.keeps_prompts:
            prompts = len(others) if phase == "loading" else 0
            results[phase]["loads"] = [loads_since(engine, before, expected, prompts)]
    engine.reset()
    return results


def begin_decodes(engine: ServingEngine, prompts: list[Prompt], limit: int) -> list[str]:
    """Start answers of `limit` tokens each, wait until all decode, and return the request ids.

    Also runs a few more steps, during which the prompts are stored.
    """
    names = [f"decode-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(name, prompt, limit)
    started: set[str] = set()
    settled = 0
    while settled < SETTLE_STEPS:
        started.update(engine.step())
        settled += len(started) == len(names)
    return names


def watch(engine: ServingEngine, running: list[Prompt], others: list[Prompt]) -> Result:
    """Run decodes and time them until the other prompts, sent one by one, are answered.

    Without other prompts, time them for `decode_steps` steps.
    """
    shape = engine.shape
    names = begin_decodes(engine, running, shape.max_model_len - shape.decode_prompt_tokens)
    last = dict.fromkeys(names, time.perf_counter())
    engine.clock.take()
    between: list[float] = []
    host: list[float] = []
    waiting = [(f"other-{index}", prompt) for index, prompt in enumerate(others)]
    waiting.reverse()
    asked: set[str] = set()
    steps = 0
    while waiting or asked or steps < (0 if others else shape.decode_steps):
        if waiting and steps % shape.steps_between == 0:
            request_id, prompt = waiting.pop()
            asked.add(request_id)
            engine.add(request_id, prompt, 1)
        done = engine.step()
        now = time.perf_counter()
        for request_id in done:
            if request_id in last:
                between.append(now - last[request_id])
                last[request_id] = now
        asked.difference_update(done)
        host.append(engine.clock.take().total())
        steps += 1
    engine.abort(names)
    result = {"between_tokens": percentiles(between), "steps": steps}
    if engine.keeps_prompts:
        result["connector_per_step"] = percentiles(host)
    return result


def link(engine: ServingEngine) -> Result:
    """Measure the bounds of a load: one contiguous copy each way, and a step of one decode.

    Without a GPU there is no link, and both rates are None.
    """
    engine.add("single", engine.prompts(40, 1, engine.shape.decode_prompt_tokens)[0], 80)
    times: list[float] = []
    while len(times) < 64:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    engine.abort(["single"])
    result: Result = {"load": None, "store": None, "decode_step": statistics.median(times)}
    if engine.on_gpu:
        host = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        for name, target, source in (("load", device, host), ("store", host, device)):
            copies = []
            for _ in range(12):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                copies.append(len(host) / (time.perf_counter() - begin))
            result[name] = statistics.median(copies)
    return result
