"""Serves the turns of conversations on one engine. All times are in seconds."""

from __future__ import annotations

import time
from typing import Any

from bench.pool.workload import Share, Workload
from bench.serving.engine import ServingEngine
from bench.serving.sections import Result

PEERS_SECONDS = 60
COUNTERS = (
    "peers_read_bytes",
    "remote_read_bytes",
    "loaded_bytes",
    "stored_bytes",
    "skipped_in_pool",
)


def meet(engine: ServingEngine) -> float:
    """Warm up, wait until all slots of the pool can be read, and return the number of peers."""
    share = share_of(engine)
    engine.wait_for_pool()
    for _ in range(2):  # computes, then loads
        engine.seconds(engine.prompts(1 + share.replica, 2, engine.shape.prompt_tokens[0]), 32)
        engine.reset()
    wanted = share.replicas - 1 if "host_pool" in engine.settings.options else 0
    deadline = time.monotonic() + PEERS_SECONDS
    while time.monotonic() < deadline:
        own, peers = engine.gauges.get("pool_slots", 0), engine.gauges.get("peer_slots", 0)
        if peers >= wanted * own:
            break
        time.sleep(0.2)
        engine.tick()
    return engine.gauges.get("peers", 0)


class Turns:
    """Each call serves this replica's share of the next turn, and waits until it is stored."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, engine: ServingEngine) -> Result:
        """Return the seconds, each request's figures, and the bytes moved."""
        share = share_of(engine)
        prompts = share.prompts(self._turn)
        before = engine.counted.copy()
        began = time.perf_counter()
        requests = serve(engine, share.workload, prompts, f"turn-{self._turn}")
        took = time.perf_counter() - began
        engine.rest()
        engine.tick()  # the next step reports a copy that the last step waited for
        self._turn += 1
        moved = {name: engine.counted[name] - before[name] for name in COUNTERS}
        return {"seconds": took, "requests": requests, **moved}


def share_of(engine: ServingEngine) -> Share:
    """Return the engine's share of the conversations."""
    assert engine.settings.share is not None, "not started by bench.pool"
    return engine.settings.share


def serve(
    engine: ServingEngine, workload: Workload, prompts: list[list[int]], name: str
) -> list[Result]:
    """Serve prompts, some at a time; return the figures of each request."""
    waiting = [(f"{name}-{number}", prompt) for number, prompt in enumerate(prompts)]
    waiting.reverse()
    began: dict[str, float] = {}
    answered: dict[str, Result] = {}
    running = 0
    while waiting or running:
        while waiting and running < workload.at_a_time:
            request_id, prompt = waiting.pop()
            began[request_id] = time.perf_counter()
            engine.add(request_id, {"prompt_token_ids": prompt}, workload.answer_tokens)
            running += 1
        outputs: list[Any] = engine.llm.llm_engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id not in answered and output.outputs[0].token_ids:
                answered[output.request_id] = {
                    "ttft": now - began[output.request_id],
                    "prompt_tokens": len(output.prompt_token_ids),
                    "cached_tokens": output.num_cached_tokens or 0,
                }
            running -= output.finished
    return [*answered.values()]
