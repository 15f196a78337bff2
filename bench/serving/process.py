"""The process of one engine: its handle in the benchmark, and the code that runs in it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.serving.settings import EngineSettings

ANSWER_SECONDS = 300
"""Maximum seconds for an engine's start or a section; a stuck engine is killed."""
END_SECONDS = 60
_BEGAN = time.monotonic()


class EngineError(RuntimeError):
    """An engine could not be started, has ended, or did not answer in time."""

    def __init__(self, column: str, text: str) -> None:
        super().__init__(f"{column}, {text}")
        self.column = column


def progress(text: str) -> None:
    """Print a line with the seconds since the benchmark began."""
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


class EngineProcess:
    """A process for one engine. It imports vLLM at once, and starts the engine on request."""

    def __init__(self, settings: EngineSettings) -> None:
        self.column = settings.column
        self.counted: dict[str, dict[str, float]] = {}
        """Counters of this project's connector in each section."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(settings, theirs))
        self._process.start()
        theirs.close()

    def ask(self, name: str) -> Any:
        """Start the engine if necessary, and run one section. Raises `EngineError`."""
        began = time.monotonic()
        try:
            self._pipe.send(name)
            if not self._pipe.poll(ANSWER_SECONDS):
                self.kill()
                raise EngineError(self.column, f"{name}: no answer within {ANSWER_SECONDS} s")
            value, counted, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(END_SECONDS)
            status = self._process.exitcode
            raise EngineError(self.column, f"{name}: it ended, exit status {status}") from None
        if error:
            raise EngineError(self.column, f"{name}: {error}")
        progress(f"{self.column}: {name} took {time.monotonic() - began:.1f} s")
        if counted:
            self.counted[name] = counted
        return value

    def close(self) -> None:
        """Let the engine exit, or kill it."""
        self._pipe.close()
        self._process.join(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the engine at once, with the processes that it started."""
        if self._process.is_alive() and self._process.pid:
            # The engine leads its own process group as soon as it runs Python.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()


_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
if not Path("/dev/nvidiactl").exists():
    # vLLM's CPU engine uses as many OpenMP threads as there are cores, and these spin while they
    # wait for each other. One more thread, such as our copy thread, makes two of them share a core:
    # on two cores, prompts took 20 times as long in most runs.
    _DEFAULTS["OMP_WAIT_POLICY"] = "passive"


def _end_with_the_bench() -> None:
    """Kill this process and its children if the benchmark is killed."""
    bench = multiprocessing.parent_process()
    assert bench is not None
    bench.join()
    os.killpg(0, signal.SIGKILL)


def serve(settings: EngineSettings, pipe: Connection) -> None:
    """Import vLLM, start an engine on request, and answer until the other end is closed.

    A request is the name of a section; the first one starts the engine. An answer contains the
    measurements, the counters of this project's connector, and an error, if any, after which the
    process ends.
    """
    os.setsid()  # for `EngineProcess.kill`
    threading.Thread(target=_end_with_the_bench, daemon=True).start()
    os.dup2(2, 1)  # the benchmark's standard output is for tables only
    os.environ.update({**_DEFAULTS, **os.environ})
    if settings.device:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.device
    try:
        # Imported only now: OpenMP reads the environment on import.
        from bench.pool.section import Turns, meet
        from bench.serving import sections
        from bench.serving.engine import ServingEngine
        from bench.tiers.section import tiers

        answers: dict[str, Callable[[ServingEngine], Any]] = {
            "pool": ServingEngine.wait_for_pool,
            "ttft": sections.ttft,
            "throughput": sections.throughput,
            "decodes": sections.decodes,
            "link": sections.link,
            "tiers": tiers,
            "meet": meet,
            "turn": Turns(),
        }
        engine: ServingEngine | None = None
        while True:
            try:
                name = pipe.recv()
            except EOFError:
                break
            if engine is None:
                engine = ServingEngine(settings)
                pipe.send((engine.start_seconds, {}, None))
                continue
            before = engine.counted.copy()
            value = answers[name](engine)
            pipe.send((value, dict(engine.counted - before), None))
        if engine is not None:
            engine.close()
    except Exception as error:  # noqa: BLE001 - the other engines continue after any error
        traceback.print_exc()
        pipe.send((None, {}, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
