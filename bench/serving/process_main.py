"""The process of one engine of the serving bench: reads requests as JSON lines, answers in kind.

The first asks for the engine's start; until it comes the process has imported what that needs.
Answers are the lines of the standard output that start with `ANSWER`; whatever else the engine
prints there is none.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from bench.serving import sections
from bench.serving.conversations import conversations
from bench.serving.engine import ServingEngine, import_engine, memory
from bench.serving.process import ANSWER
from bench.serving.shapes import SHAPES


def answer(value: Any) -> None:
    print(ANSWER + json.dumps(value), flush=True)


def serve(engine: ServingEngine) -> None:
    """Answer requests of the form `{"do": name, ...}` until the input ends."""
    answers: dict[str, Callable[..., Any]] = {
        "ttft": sections.ttft,
        "throughput": sections.throughput,
        "latency": sections.latency,
        "conversations": conversations,
        "turn": sections.turn,
        "link": sections.link,
        "memory": lambda engine: {
            "before": engine.memory_before,
            "now": memory(),
            "pool_bytes": engine.totals["pool_bytes"] or None,
        },
    }
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        started, before = time.monotonic(), engine.totals.counters()
        value = answers[name](engine, **request)
        after = engine.totals.counters()
        counted = {key: after[key] - was for key, was in before.items() if after[key] != was}
        answer({"value": value, "counted": counted, "took": time.monotonic() - started})


def main() -> None:
    """Import vLLM, wait, start an engine as the first argument says, a JSON object, and serve."""
    arguments = json.loads(sys.argv[1])
    shape = SHAPES[arguments.pop("shape")]
    try:
        import_engine()
        if not sys.stdin.readline():
            return
        engine = ServingEngine(shape, **arguments)
        answer({"value": engine.start_seconds, "took": engine.start_seconds})
        serve(engine)
        engine.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other connectors go on
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
