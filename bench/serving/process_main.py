"""What runs in the process of one engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.serving.settings import EngineSettings

_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
if not Path("/dev/nvidiactl").exists():
    # vLLM's CPU engine computes with as many OpenMP threads as there are cores, and these spin
    # while they wait for each other. A further thread, such as that of our copies, makes two of
    # them share a core: on two cores, prompts took 20 times as long in most runs.
    _DEFAULTS["OMP_WAIT_POLICY"] = "passive"


def _end_with_the_bench() -> None:
    """End this process and those that it started if the bench is killed."""
    bench = multiprocessing.parent_process()
    assert bench is not None
    bench.join()
    os.killpg(0, signal.SIGKILL)


def serve(settings: EngineSettings, pipe: Connection) -> None:
    """Import vLLM, start an engine when asked to, and answer until the other end is closed.

    A request is the name of a section and its arguments; the first one starts the engine. An answer
    is what was measured, what this project's connector counted meanwhile, and an error, with which
    the process ends.
    """
    os.setsid()  # for `EngineProcess.kill`
    threading.Thread(target=_end_with_the_bench, daemon=True).start()
    os.dup2(2, 1)  # the tables are all that the bench writes to its standard output
    os.environ.update({**_DEFAULTS, **os.environ})
    try:
        # Only now: OpenMP reads the environment when it is imported.
        from bench.serving import sections
        from bench.serving.conversations import conversations
        from bench.serving.engine import ServingEngine
        from bench.tiers.section import tiers

        measured: list[Any] = [sections.ttft, sections.throughput, sections.latency, conversations]
        measured += [sections.turn, sections.link, sections.memory, tiers]
        answers = {section.__name__: section for section in measured}
        engine: ServingEngine | None = None
        while True:
            try:
                name, more = pipe.recv()
            except EOFError:
                break
            if engine is None:
                engine = ServingEngine(settings)
                pipe.send((engine.start_seconds, {}, None))
                continue
            before = engine.counted.copy()
            value = answers[name](engine, **more)
            pipe.send((value, dict(engine.counted - before), None))
        if engine is not None:
            engine.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other engines go on
        traceback.print_exc()
        pipe.send((None, {}, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
