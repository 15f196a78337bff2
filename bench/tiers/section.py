"""The requests to each engine in a comparison of tiers. All times are in seconds."""

from __future__ import annotations

import time
from typing import Any

from bench.serving.engine import Prompt, ServingEngine
from bench.serving.sections import Result, warm_up, watch
from bench.serving.stats import spread

REPEATS = 3
"""Number of prompts of each length."""
OTHER_PROMPTS = 12
"""Number of prompts, of `other_tokens` tokens, that are moved while decodes are measured."""


def tiers(engine: ServingEngine) -> Result:
    """Measure time to first token by the place that has the prompt, and decodes next to moves."""
    engine.wait_for_pool()
    return {"first_token": first_tokens(engine), "decodes": beside_moves(engine)}


def first_tokens(engine: ServingEngine) -> Result:
    """Measure time to first token of a prompt: computed, from host memory, and from the tier.

    For the tier, also returns the bytes that were read, and the bytes that had to be read.
    """
    warm_up(engine)
    results = {}
    for length in engine.shape.prompt_tokens:
        took: dict[str, list[float]] = {"computed": [], "host memory": [], "below": []}
        read = 0.0
        for seed in range(60, 60 + REPEATS):
            batch = engine.prompts(seed, 1, length)
            took["computed"].append(engine.seconds(batch))
            engine.reset()
            took["host memory"].append(engine.seconds(batch))
            if has_tier(engine):
                forget_host_memory(engine)
                before = engine.counted["promoted_bytes"]
                took["below"].append(engine.seconds(batch))
                engine.tick()
                read += engine.counted["promoted_bytes"] - before
            engine.reset()
        results[str(length)] = {
            **{place: spread(times) for place, times in took.items() if times},
            "bytes_read": read,
            "bytes_needed": REPEATS * engine.shape.loadable_bytes(length, engine.item_bytes)[0],
        }
    return results


def beside_moves(engine: ServingEngine) -> Result:
    """Measure decodes alone, and while the tier is written, prompts are loaded, or it is read.

    In the phase that writes to a tier, an engine without one does nothing else.
    """
    shape = engine.shape
    others = engine.prompts(70, OTHER_PROMPTS, shape.other_tokens)
    results: Result = {"alone": _decodes(engine, 71)}
    engine.seconds(others)
    results["after computing"] = _decodes(engine, 72)
    engine.reset()
    results["loading"] = _decodes(engine, 73, others)
    if has_tier(engine):
        forget_host_memory(engine)
        results["reading"] = _decodes(engine, 74, others)
    engine.reset()
    return results


def _decodes(engine: ServingEngine, seed: int, others: list[Prompt] | None = None) -> Result:
    shape = engine.shape
    before = engine.counted.copy()
    began = time.perf_counter()
    prompts = engine.prompts(seed, shape.decodes, shape.decode_prompt_tokens)
    result = watch(engine, prompts, others or [])
    took = time.perf_counter() - began
    engine.tick()
    moved = engine.counted - before
    names = ("demoted_bytes", "promoted_bytes", "loaded_bytes", "late_promotions")
    return {**result, "seconds": took, **{name: moved[name] for name in names}}


def has_tier(engine: ServingEngine) -> bool:
    """Return whether this engine has a disk or a remote store."""
    return bool({"disk", "remote"} & engine.settings.options.keys())


def forget_host_memory(engine: ServingEngine) -> None:
    """Wait until the tier has all prompts, then empty host memory: only the tier has them then."""
    engine.reset()
    core: Any = engine.llm.llm_engine.engine_core.engine_core
    core.scheduler.connector.offload_scheduler.manager.reset()
