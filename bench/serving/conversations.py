"""Conversations: users who come back, each time with a longer prompt, while others are served.

A turn's prompt is all that was said before and something new. The GPU's cache holds a few of the
conversations, so most turns find their history in host memory or have it computed again.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

from bench.serving.engine import ServingEngine
from bench.serving.sections import Result, loads_since
from bench.serving.stats import percentiles
from tests.support.conversations import Conversations, Talk


def conversations(engine: ServingEngine, seed: int) -> Result:
    """Hold conversations; return how long it took, and how long their users waited for tokens.

    The same `seed` asks the same questions in the same order; the answers are the engine's. Before
    that a few others are held twice, so that everything is compiled and measured.
    """
    load = engine.shape.conversations
    few = dataclasses.replace(load, count=load.at_once, turns=2)
    for _ in range(2):
        _hold(engine, few, 1_000_000)
        engine.reset()
    before = engine.counted["loaded_bytes"]
    talk = _hold(engine, load, seed)
    waits = talk.waits
    result: Result = {
        "seconds": talk.seconds,
        "turns": len(waits),
        "first_token": {"mean": statistics.mean(waits), **percentiles(waits)},
        "between_tokens": percentiles(talk.between_tokens),
    }
    engine.rest()
    if engine.settings.is_ours:
        result["loads"] = [loads_since(engine, before, _loadable(engine, talk))]
    engine.reset()
    return result


def _hold(engine: ServingEngine, load: Conversations, seed: int) -> Talk:
    talk = Talk(load, seed)
    while not talk.is_over:
        while turn := talk.ask(time.perf_counter()):
            prompt = {"prompt_token_ids": turn.prompt}
            engine.add(turn.request_id, prompt, turn.answer_tokens)
        talk.take(engine.step(), time.perf_counter())
    return talk


def _loadable(engine: ServingEngine, talk: Talk) -> tuple[int, int]:
    """Return the least and the most bytes that must be loaded.

    At most all prompts are loaded. What the GPU's cache cannot hold of all conversations must be
    loaded once, but for the last words of each, which nobody asks for again: half of it at least.
    """
    shape = engine.shape
    token_bytes = shape.token_bytes(engine.item_bytes)
    spoken = sum(map(len, talk.spoken)) - shape.gpu_blocks * shape.block_tokens
    asked = sum(turn.prompt_tokens for turn in talk.turns)
    return max(token_bytes, spoken * token_bytes // 2), asked * token_bytes
