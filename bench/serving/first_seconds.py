"""Measures decodes after an engine's start, while host memory is page-locked in the background."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.serving.stats import percentiles

if TYPE_CHECKING:
    from bench.serving.engine import ServingEngine

ANSWER_TOKENS = 1500
"""Tokens of each decode before new ones begin: the GPU cache has no room for more."""
LONG = 1.5
"""A step is long if it takes this many times the median."""

FIRST_SECONDS = 10.0
"""The first seconds of decodes, in which an engine's host memory is locked."""

Span = tuple[float, float]


def first_seconds(engine: ServingEngine) -> dict[str, Any]:
    """Return the steps by second, and the number of long ones that overlap a registration."""
    from bench.serving.sections import begin_decodes  # imports vLLM

    shape = engine.shape
    steps: list[Span] = []
    shares: list[float] = []
    is_ours = engine.settings.is_ours
    end = time.perf_counter() + shape.start_seconds
    for seed in itertools.count(50):
        if time.perf_counter() > end:
            break
        engine.reset()
        prompts = engine.prompts(seed, shape.decodes, shape.decode_prompt_tokens)
        names = begin_decodes(engine, prompts, shape.max_model_len - shape.decode_prompt_tokens)
        before = time.perf_counter()
        for _ in range(ANSWER_TOKENS):
            engine.step()
            now = time.perf_counter()
            steps.append((before, now))
            shares.append(engine.pool_share if is_ours else 1.0)
            before = now
            if now > end:
                break
        engine.abort(names)
    return describe(steps, shares, engine.registrations, engine.began)


def describe(
    steps: Sequence[Span], shares: Sequence[float], registrations: Sequence[Span], began: float
) -> dict[str, Any]:
    """Summarise steps, given with the share of host memory that was ready at each.

    All times are from one clock; returned times count from `began`.
    """
    seconds = [end - begin for begin, end in steps]
    growing = bisect_left(shares, 1.0)  # the share never falls
    ends = [end for _, end in registrations]
    met = [_meets(step, registrations, ends) for step in steps]
    usual = percentiles(seconds)["p50"]
    long = [index for index, took in enumerate(seconds) if took > LONG * usual]
    line = []
    by_second = itertools.groupby(range(len(steps)), lambda i: int(steps[i][1] - began))
    for second, indexes in by_second:
        chosen = list(indexes)
        took = percentiles([seconds[index] for index in chosen])
        line.append({"second": second, **took, "ready": shares[chosen[-1]]})
    late = bisect_left(steps, (steps[0][0] + FIRST_SECONDS,))
    spans = {
        "while host memory grows": seconds[:growing],
        "first 10 s": seconds[:late],
        "later": seconds[late:],
    }
    return {
        **{name: percentiles(took) if took else None for name, took in spans.items()},
        "first_step": steps[0][0] - began,
        "ready": steps[growing][1] - began if 0 < growing < len(steps) else None,
        "registrations": {
            "count": len(registrations),
            **(percentiles([end - begin for begin, end in registrations]) if registrations else {}),
        },
        "long_steps": {"count": len(long), "beside_registration": sum(met[i] for i in long)},
        "steps_beside_registration": sum(met),
        "line": line,
    }


def _meets(step: Span, others: Sequence[Span], ends: Sequence[float]) -> bool:
    """Return whether a span overlaps one of the ordered spans `others`, which end at `ends`."""
    place = bisect_left(ends, step[0])
    return place < len(others) and others[place][0] < step[1]
