"""The process of one engine, as the bench sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ANSWER = "ANSWER "
"""How lines of the process's output begin that are answers."""

ANSWER_SECONDS = 300
"""Longest wait for an engine's start or for one section; a stuck engine is ended."""

_BEGAN = time.monotonic()

_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
if not Path("/dev/nvidiactl").exists():
    # vLLM's CPU engine computes with as many OpenMP threads as there are cores, and these spin
    # while they wait for each other. A further thread, such as that of our copies, makes two of
    # them share a core: on two cores, prompts took 20 times as long in most runs.
    _DEFAULTS["OMP_WAIT_POLICY"] = "passive"


class EngineError(RuntimeError):
    """An engine could not be started, or ended, or did not answer in time."""


def progress(text: str) -> None:
    """Print a line with the seconds since the bench began."""
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


class EngineProcess:
    """A process for one engine; it imports vLLM at once, and starts the engine when asked to."""

    def __init__(
        self,
        shape: str,
        connector: str,
        separate_core: bool,
        options: Any,
        model: str,
        step_tokens: int | None = None,
    ) -> None:
        self.connector = connector
        self.counted: dict[str, dict[str, float]] = {}
        """What the connector counted in each section, of this project only."""
        arguments = {
            "shape": shape,
            "connector": connector,
            "separate_core": separate_core,
            "options": options,
            "model": model,
            "step_tokens": step_tokens,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.serving.process_main", json.dumps(arguments)],
            env=_DEFAULTS | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that `_kill` reaches an engine core of its own
        )

    def start(self) -> float:
        """Start the engine; return the seconds that took."""
        progress(f"{self.connector}: starting an engine")
        return float(self.ask("start"))

    def ask(self, name: str, **more: Any) -> Any:
        """Have one section measured. Raises `EngineError`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps({"do": name, **more}) + "\n")
            self._process.stdin.flush()
        return self._answer(name)

    def close(self) -> None:
        """Let the engine end by itself, or end it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, name: str) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if not line.startswith(ANSWER):
                    print(line, end="", file=sys.stderr)
                    continue
                answer = json.loads(line.removeprefix(ANSWER))
                if "error" in answer:
                    raise EngineError(f"{self.connector}, {name}: {answer['error']}")
                if name != "turn":
                    progress(f"{self.connector}: {name} took {answer['took']:.1f} s")
                    if answer.get("counted"):
                        self.counted[name] = answer["counted"]
                return answer["value"]
        finally:
            timer.cancel()
        status = self._process.wait()
        raise EngineError(
            f"{self.connector}, {name}: no answer within {ANSWER_SECONDS} s, exit status {status}"
        )
