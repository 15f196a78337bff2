"""What a test does to the scheduler side of a played engine between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kv_offload.measurement import MIN_MEASUREMENTS
from kv_offload.messages import OffloadWorkerMetadata, Outcome, RankReport
from tests.support.configurations import make_request
from tests.support.played_engine import PlayedEngine


def held_tokens(engine: PlayedEngine, prompt: Sequence[int]) -> int | None:
    """Return how many tokens of a prompt's full blocks are in host memory; see `match`."""
    asking = make_request("asks", [*prompt, 0], engine.hash_block_tokens)
    tokens: int | None = engine.offload.match(asking, 0)[0]
    engine.offload.finished(asking, None)
    return tokens


def report(
    engine: PlayedEngine, outcomes: Mapping[int, Outcome], rank: int = 0, **more: Any
) -> None:
    """Report how jobs ended on a rank."""
    told = RankReport(dict(outcomes), **more)
    engine.offload.apply_report(OffloadWorkerMetadata({rank: told}))


def teach(engine: PlayedEngine, bytes_per_second: float) -> None:
    """Make the engine believe that it measured this link, and a million tokens per second."""
    watch = engine.offload.watch
    for _ in range(15):
        watch.load_rate.learn(bytes_per_second)
    for size in (64, 8192):
        for _ in range(MIN_MEASUREMENTS):
            watch.prefill_rate.learn(size, 1, size / 1e6)
